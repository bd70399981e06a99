// SPDX-License-Identifier: Apache-2.0

// Package ids gives names (services, backends, rules, sets, pool addresses) numbers that stay the same
// from one snapshot to the next and from one process to the next, because flows refer to them.
package ids
