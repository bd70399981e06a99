// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Lookups in prefix lists, and helpers for rules that rewrite prefixes without state.
#ifndef SLUICE_PREFIX_H
#define SLUICE_PREFIX_H

#include "maps.h"

// Reports whether a list of interfaces contains this interface.
__noinline int listed(__u32 list, __u32 ifindex)
{
	struct interface_addr *i = bpf_map_lookup_elem(&interfaces, &ifindex);

	return i && i->lists >> (list & 63) & 1;
}

// Reports whether the interfaces of a rule include this index. Zero means every interface.
static __always_inline bool includes(__u32 of, __u32 ifindex)
{
	return !of || of == ifindex || (of & INTERFACE_LIST && listed(of, ifindex));
}

// A separate function, so that its keys do not occupy the stack frames of its callers.
__noinline __u64 member_find(const union addr *a, __u32 list, __u32 v6)
{
	struct member_key key = {
		.prefix_len = 32 + (v6 ? 128 : 32),
		.list = list | (v6 ? FAMILY_6 : FAMILY_4) << 8,
	};
	__u64 *bits;

	if (!a)
		return 0;
	__builtin_memcpy(key.addr, a, sizeof(key.addr));
	if (host_lists >> (list & 31) & 1) {
		bits = bpf_map_lookup_elem(&hosts, &key.list); // a host_key is the tail of a member_key
		if (bits)
			return *bits;
	}
	if (!(trie_lists >> (list & 31) & 1))
		return 0;
	bits = bpf_map_lookup_elem(&members, &key);
	return bits ? *bits : 0;
}

// Returns the bits of the sets, rules or exceptions that contain an address.
static __always_inline __u64 member_of(const union addr *a, __u32 list, bool v6)
{
	return (host_lists | trie_lists) >> (list & 31) & 1 ? member_find(a, list, v6) : 0;
}

static __always_inline struct prefix *prefix_of(const union addr *a, enum prefix_role role, bool v6)
{
	struct prefix_key key = {
		.prefix_len = 32 + (v6 ? 128 : 32),
		.role = role,
		.family = v6 ? FAMILY_6 : FAMILY_4,
	};

	__builtin_memcpy(key.addr, a, sizeof(key.addr));
	return bpf_map_lookup_elem(&prefixes, &key);
}

// Replaces the first "bits" bits of an address with a prefix.
static __always_inline void replace_prefix(union addr *a, const union addr *prefix, __u32 bits)
{
	for (int i = 0; i < 4; i++) {
		__u32 mask;

		if (bits >= 32 * ((__u32)i + 1))
			mask = 0xffffffff;
		else if (bits > 32 * (__u32)i)
			mask = ~(0xffffffffU >> (bits - 32 * i));
		else
			mask = 0;
		mask = bpf_htonl(mask);
		a->w[i] = (prefix->w[i] & mask) | (a->w[i] & ~mask);
	}
}

static __always_inline bool in_prefix(const union addr *a, const union addr *prefix, __u32 bits)
{
	union addr put = *a;

	replace_prefix(&put, prefix, bits);
	return put.d[0] == a->d[0] && put.d[1] == a->d[1];
}

// Embeds an IPv4 address in a prefix of 32, 40, 48, 56, 64 or 96 bits (RFC 6052 §2.2). Bits 64 to
// 71 remain 0.
static __always_inline void embed(union addr *out, const union addr *prefix, __u32 len, __be32 v4)
{
	__u8 *b = (__u8 *)&v4;

	*out = *prefix;
	switch (len) {
	case 96:
		out->w[3] = v4;
		break;
	case 64:
		__builtin_memcpy(&out->b[9], b, 4);
		break;
	case 56:
		out->b[7] = b[0];
		__builtin_memcpy(&out->b[9], b + 1, 3);
		break;
	case 48:
		__builtin_memcpy(&out->b[6], b, 2);
		__builtin_memcpy(&out->b[9], b + 2, 2);
		break;
	case 40:
		__builtin_memcpy(&out->b[5], b, 3);
		out->b[9] = b[3];
		break;
	default: // a prefix of 32 bits
		out->w[1] = v4;
	}
}

static __always_inline __be32 extract(const union addr *a, __u32 len)
{
	__be32 v4;
	__u8 *b = (__u8 *)&v4;

	switch (len) {
	case 96:
		return a->w[3];
	case 64:
		__builtin_memcpy(b, &a->b[9], 4);
		return v4;
	case 56:
		b[0] = a->b[7];
		__builtin_memcpy(b + 1, &a->b[9], 3);
		return v4;
	case 48:
		__builtin_memcpy(b, &a->b[6], 2);
		__builtin_memcpy(b + 2, &a->b[9], 2);
		return v4;
	case 40:
		__builtin_memcpy(b, &a->b[5], 3);
		b[3] = a->b[9];
		return v4;
	}
	return a->w[1];
}

// Reports whether Linux drops packets from an IPv4 address as martian (ip_route_input_slow):
// unspecified, loopback, multicast and broadcast. It routes the rest of 0/8 and 240/4, and
// 169.254/16.
static __always_inline bool martian4(__be32 v4)
{
	__u32 a = bpf_ntohl(v4);

	return !a || a >> 24 == 127 || a >> 28 == 0xe || a == 0xffffffff;
}

// Reports whether an IPv4 address has no meaning in IPv6: a martian one, or a link-local one (RFC
// 3927 §2.7).
static __always_inline bool nowhere4(__be32 v4)
{
	return martian4(v4) || bpf_ntohl(v4) >> 16 == 0xa9fe;
}

#endif
