// SPDX-License-Identifier: Apache-2.0

// Package nftlb implements the HTTP API of nftlb, the nftables load balancer, for unmodified clients. It supports
// farms, backends, addresses, policies, elements and sessions, with nftlb's replies, defaults and order of keys. The
// objects become services and sets of the configuration. Settings without an equivalent are stored and shown, and
// cause a warning.
//
// nftlb's rules for the states of farms and backends belong to its API, because clients read the states. They were
// learned from its documentation and its answers; [Store] follows them.
//
// It has more than 3,000 lines, one file per kind of object. The objects refer to each other, and one request may
// contain all kinds.
package nftlb
