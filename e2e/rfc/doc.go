// SPDX-License-Identifier: Apache-2.0

// Package rfc proves docs/reference/rfc.md: a test for each requirement of the NAT RFCs,
// with real kernels at both ends of a gateway in network namespaces, on every
// datapath.
//
//	i1, i2 ---- lan0 gateway wan0 ---- o1, o2
//
// The inside hosts are 10.0.2.2 and .3 (fd00:2::2 and ::3), the outside hosts
// 198.51.100.11, .12 (o1) and .21 (o2). They route the pool 203.0.113.0/24 to the
// gateway, whose outside link has an MTU of 1400 bytes.
//
// docs/reference/rfc.md says for each requirement and datapath whether it is met. A test
// fails when the ledger says "met" and it is not, and when it says "not met" and
// it is. Long timers are read from the flows rather than waited for.
package rfc
