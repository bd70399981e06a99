// SPDX-License-Identifier: Apache-2.0

// Package e2e tests the real program on the lab's networks: what it does to real traffic, to the
// host, and when things go wrong. Its tests need root and skip without it.
package e2e
