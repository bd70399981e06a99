// SPDX-License-Identifier: Apache-2.0

// Package rfc verifies docs/reference/rfc.md. It has a test for each requirement of the NAT RFCs, with real kernels at both
// ends of a gateway in network namespaces, on every datapath.
//
//	i1, i2 ---- lan0 gateway wan0 ---- o1, o2
//
// The inside hosts are 10.0.2.2 and .3 (fd00:2::2 and ::3), the outside hosts 198.51.100.11, .12 (o1) and .21 (o2).
// They route the pool 203.0.113.0/24 to the gateway. The MTU of its outside link is 1400 bytes.
//
// docs/reference/rfc.md contains the result for each requirement and datapath. A test fails if its result differs from the
// ledger. Long timers are read from the flows instead of waiting.
package rfc
