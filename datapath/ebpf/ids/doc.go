// SPDX-License-Identifier: Apache-2.0

// Package ids assigns numbers to names (services, backends, rules, sets, pool addresses). Flows refer to the numbers,
// so they are stable across snapshots and processes.
package ids
