// SPDX-License-Identifier: Apache-2.0

// Package nftlb answers the HTTP API of nftlb, the nftables load balancer, so that its clients work
// unchanged: farms, backends, addresses, policies, elements and sessions, with the replies, the
// defaults and the order of keys that they know. What the objects ask for becomes services and
// sets of the configuration; what has no equal there is kept and shown, and told in a warning.
//
// The rules by which nftlb changes the states of farms and backends are a part of its API: clients
// read the states. They were learned from its documentation and its answers; [Store] follows them.
//
// It has more than 3,000 lines, a file for each kind of object: they refer to each other, and a request
// may hold all of them at once.
package nftlb
