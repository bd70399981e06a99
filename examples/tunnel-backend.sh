#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A Linux backend of a service in mode tunnel: what arrives wrapped is unwrapped, and
# answered straight to the client. Give lo the virtual addresses beside it, for example
# "ip addr add 192.0.2.40/32 dev lo". TestTunnelBackends runs these lines.

# IPIP to an IPv4 address of this host (4in4)
ip link add name decap4 type ipip external
ip link set decap4 up

# IPIP to an IPv6 address (4in6, 6in6)
ip link add name decap6 type ip6tnl mode any external
ip link set decap6 up

# GUE (tunnel: {type: gue, port: 6080}) needs the links above too
ip fou add port 6080 gue
ip fou add port 6080 gue -6

# packets come by these links whose answers leave by another
sysctl -w net.ipv4.conf.all.rp_filter=0
sysctl -w net.ipv4.conf.decap4.rp_filter=0
sysctl -w net.ipv4.conf.decap6.rp_filter=0
