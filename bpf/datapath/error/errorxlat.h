// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Translation of ICMP errors between the families. All headers before the quoted segment are
// replaced.
#ifndef SLUICE_ERRORXLAT_H
#define SLUICE_ERRORXLAT_H

#include "error/error.h"

// Translates the ports, or ICMP type and identifier, of the quoted segment. Its checksum is updated
// if it is quoted, but never verified (RFC 5508 REQ-3c).
static __always_inline bool translate_quoted_l4(void *ctx, const struct plan *plan, const struct quote *q,
						const bool to_v6, const bool xdp)
{
	__u64 addrs = minus(sum_ends(&q->saddr, &q->daddr, !to_v6)) + sum_ends(&plan->to.saddr, &plan->to.daddr, to_v6);
	struct ports ports = { plan->to.dport, plan->to.sport };
	struct icmp_header icmp;
	__u32 at = quoted_check(q);
	__u16 check, was;

	if (is_icmp(q->l4_proto)) {
		__u32 len = bpf_ntohs(q->len) - (q->l4_at - q->at) + (to_v6 ? 0 : sizeof(struct ipv6hdr));
		__u64 pseudo = bpf_htons(len) + bpf_htons(IPPROTO_ICMPV6);

		if (!get(ctx, q->l4_at, &icmp, sizeof(icmp), xdp))
			return false;
		was = *(__u16 *)&icmp;
		if (to_v6)
			icmp.type = icmp.type == ICMP4_ECHO ? ICMP6_ECHO : ICMP6_ECHO_REPLY;
		else
			icmp.type = icmp.type == ICMP6_ECHO ? ICMP4_ECHO : ICMP4_ECHO_REPLY;
		pseudo = to_v6 ? pseudo + sum_ends(&plan->to.saddr, &plan->to.daddr, true) :
				 minus(pseudo + sum_ends(&q->saddr, &q->daddr, true));
		icmp.check = check_after(icmp.check,
					 pseudo + change(was, *(__u16 *)&icmp) + change(icmp.id, plan->to.dport));
		icmp.id = plan->to.dport;
		return put(ctx, q->l4_at, &icmp, sizeof(icmp), xdp);
	}
	if (!put(ctx, q->l4_at, &ports, sizeof(ports), xdp))
		return false;
	if (!at || !get(ctx, at, &check, 2, xdp))
		return true;
	if (q->l4_proto == IPPROTO_UDP && !check)
		return true;
	check = check_after(check, addrs + change(q->sport, ports.source) + change(q->dport, ports.dest));
	if (q->l4_proto == IPPROTO_UDP && !check)
		check = 0xffff;
	return put(ctx, at, &check, 2, xdp);
}

static __always_inline __u32 quote6_size(const struct quote *q)
{
	return sizeof(struct ipv6hdr) + (q->fragment ? sizeof(struct fragment_header) : 0);
}

static __always_inline bool put_quote6(void *ctx, __u32 at, const struct plan *plan, const struct quote *q,
				       const bool xdp)
{
	struct fragment_header f = { .next = is_icmp(q->l4_proto) ? IPPROTO_ICMPV6 : q->l4_proto };
	__u32 extra = quote6_size(q) - sizeof(struct ipv6hdr);
	struct ipv6hdr ip;

	*(__u32 *)&ip = bpf_htonl(6U << 28 | (__u32)q->tos << 20);
	ip.payload_len = bpf_htons(bpf_ntohs(q->len) - (q->l4_at - q->at) + extra);
	ip.nexthdr = extra ? NEXT_FRAGMENT : f.next;
	ip.hop_limit = q->ttl;
	__builtin_memcpy(&ip.saddr, &plan->to.daddr, 16);
	__builtin_memcpy(&ip.daddr, &plan->to.saddr, 16);
	if (extra) {
		f.offset = bpf_htons(1);
		f.id = q->frag_id; // the 16 low-order bits of the field, in network byte order
		if (!put(ctx, at + sizeof(ip), &f, sizeof(f), xdp))
			return false;
	}
	return put(ctx, at, &ip, sizeof(ip), xdp);
}

static __always_inline bool put_quote4(void *ctx, __u32 at, const struct plan *plan, const struct quote *q,
				       const bool xdp)
{
	__u32 len = sizeof(struct iphdr) + sizeof(struct ipv6hdr) + bpf_ntohs(q->len) - (q->l4_at - q->at), *w;
	struct iphdr ip = {
		.version = 4,
		.ihl = 5,
		.tos = q->tos,
		.tot_len = bpf_htons(len),
		.ttl = q->ttl,
		.protocol = is_icmp(q->l4_proto) ? IPPROTO_ICMP : q->l4_proto,
		.saddr = plan->to.daddr.w[0],
		.daddr = plan->to.saddr.w[0],
	};

	if (q->fragment) {
		ip.id = q->frag_id >> 16;
		ip.frag_off = q->fragment & QUOTE_MORE ? bpf_htons(IP_MF) : 0;
	} else if (len > SMALL_PACKET)
		ip.frag_off = bpf_htons(IP_DF);
	w = (__u32 *)&ip;
	ip.check = ~fold16((__u64)w[0] + w[1] + w[2] + w[3] + w[4]);
	return put(ctx, at, &ip, sizeof(ip), xdp);
}

// Truncates the frame. This must be the last step: the NIC's checksum of the whole packet
// (CHECKSUM_COMPLETE) is valid until here, and the kernel discards it on truncation. GSO packets
// take this step at any size, because it turns them into single packets.
static __always_inline bool truncate(void *ctx, __u32 have, __u32 want, const bool xdp)
{
	if (have < want || (have == want && (xdp || !((struct __sk_buff *)ctx)->gso_size)))
		return true;
	if (xdp)
		return !bpf_xdp_adjust_tail(ctx, (int)want - (int)have);
	bpf_csum_update(ctx, fold32(minus(sum_of(ctx, ETH_HLEN, have - ETH_HLEN, false)) +
				    sum_of(ctx, ETH_HLEN, want - ETH_HLEN, false)));
	return !bpf_skb_change_tail(ctx, want, 0);
}

// Moves the extension at "from", the last len bytes of a packet, by a multiple of four. The sum of
// the frame does not change.
static __always_inline bool move_extension(void *ctx, __u32 from, __u32 to, __u32 len, const bool xdp)
{
	struct work *w = the_work();
	const __u32 zero = 0;

	if (!w || !len || len > EXTENSION_MAX)
		return false;
	bounded(len);
	len = ((len - 1) & (EXTENSION_MAX - 1)) + 1;
	if (xdp ? bpf_xdp_load_bytes(ctx, from, w->extension, len) : bpf_skb_load_bytes(ctx, from, w->extension, len))
		return false;
	if (to > from && (xdp ? bpf_xdp_adjust_tail(ctx, to - from) :
				bpf_skb_change_tail(ctx, ((struct __sk_buff *)ctx)->len + to - from, 0)))
		return false;
	for (int i = 0; i < FIELD_MIN / 4 && from < to; i++, from += 4)
		if (!put(ctx, from, &zero, 4, xdp))
			return false;
	return !(xdp ? bpf_xdp_store_bytes(ctx, to, w->extension, len) :
		       bpf_skb_store_bytes(ctx, to, w->extension, len, BPF_F_RECOMPUTE_CSUM));
}

BOTH_HOOKS(int, move_extension, move_extension(ctx, from, to, len, xdp), __u32 from, __u32 to, __u32 len)

// The ICMP extension of a translated error. All lengths are in bytes.
struct error_extension {
	__u32 len;   // length of the extension; 0: it is absent or does not fit
	__u32 field; // length of the translated quotation before it
	__u32 want;  // length of the quotation in the sent error: padded, or four bytes shorter
};

// Computes the position of an extension, and sets the length field of the error (RFC 7915 §4.2,
// §5.2). The extension is omitted if the message type has none (RFC 4884 §4) or if it does not fit.
static __always_inline void place_extension(struct error_extension *e, struct icmp_header *icmp, const struct packet *p,
					    const struct quote *q, __u32 inner, __u32 limit, const bool to_v6)
{
	*e = (struct error_extension){};
	if (!q->field || (to_v6 && icmp->type != ICMP6_UNREACHABLE && icmp->type != ICMP6_TIME_EXCEEDED))
		return;
	e->field = inner + q->at + q->field - q->l4_at;
	e->want = to_v6 ? e->field & ~7U : e->field;
	if (e->want < FIELD_MIN)
		e->want = FIELD_MIN;
	e->len = ETH_HLEN + p->l3_len - q->at - q->field;
	if (e->len > EXTENSION_MAX || ICMP_SIZE + e->want + e->len > limit)
		e->len = 0;
	else if (to_v6)
		((__u8 *)&icmp->id)[0] = e->want / 8;
	else
		((__u8 *)&icmp->id)[1] = e->want / 4;
}

// Returns the highest MTU that a translated error may report (RFC 7915 §4.2, §5.2). The next hop
// limits it, and so does the interface of arrival. "more" converts the MTU of that interface to the
// other family.
static __always_inline __u32 mtu_limit(const struct packet *p, __u32 next, int more)
{
	__u32 ifindex = p->ifindex;
	struct interface_addr *in = bpf_map_lookup_elem(&interfaces, &ifindex);

	return in && in->mtu && in->mtu + more < next ? in->mtu + more : next;
}

// Translates an error into the other family. from: the new source of the error.
static __always_inline enum reason translate_error(void *ctx, struct packet *p, struct plan *plan,
						   const struct quote *q, const union addr *from, __u32 mtu,
						   const bool to_v6, const bool xdp)
{
	__u32 outer = to_v6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr), inner = to_v6 ? quote6_size(q) : outer;
	__u32 rest = q->end - q->l4_at, len, at, have;
	__u32 limit = to_v6 ? 1280 - 40 : 576 - 20;
	struct icmp_header icmp;
	struct error_extension e;
	__u64 sum;

	if (untranslatable_route(ctx, p, to_v6, xdp) || extended_fragment(p))
		return REASON_UNTRANSLATABLE;
	if (!get(ctx, p->l4_off, &icmp, sizeof(icmp), xdp))
		return REASON_INTERNAL;
	mtu = mtu_limit(p, mtu, to_v6 ? 20 : q->fragment ? -28 : -20);
	if (!(to_v6 ? message6(&icmp, q, mtu) : message4(&icmp, q, mtu)))
		return REASON_UNTRANSLATABLE;
	if (!q->no_l4 && !translate_quoted_l4(ctx, plan, q, to_v6, xdp))
		return REASON_INTERNAL;
	if (!resize_header(ctx, q->l4_at - ETH_HLEN - ICMP_SIZE, outer + inner, to_v6, xdp))
		return REASON_INTERNAL;
	place_extension(&e, &icmp, p, q, inner, limit, to_v6);
	len = e.len ? ICMP_SIZE + e.want + e.len : ICMP_SIZE + inner + rest;
	if (len > limit)
		len = limit;
	at = ETH_HLEN + outer;
	if (!(to_v6 ? put_quote6(ctx, at + ICMP_SIZE, plan, q, xdp) : put_quote4(ctx, at + ICMP_SIZE, plan, q, xdp)))
		return REASON_INTERNAL;
	// header4 and header6 read the addresses from the plan.
	plan->to.saddr = *from;
	plan->to.l4_proto = to_v6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP;
	p->flags &= ~(PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT | PACKET_MORE);
	icmp.check = 0;
	if (!put(ctx, at, &icmp, sizeof(icmp), xdp))
		return REASON_INTERNAL;
	if (e.len)
		sum = sum_of(ctx, at, ICMP_SIZE + (e.field < e.want ? e.field : e.want), xdp) +
		      sum_of(ctx, at + ICMP_SIZE + e.field, e.len, xdp);
	else
		sum = sum_of(ctx, at, len, xdp);
	if (to_v6) {
		struct ipv6hdr ip;

		sum += sum_ends(from, &plan->to.daddr, true) + bpf_htons(len) + bpf_htons(IPPROTO_ICMPV6);
		header6(&ip, p, plan, len);
		if (!put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp))
			return REASON_INTERNAL;
	} else {
		struct iphdr ip;

		header4(&ip, p, plan, len, bpf_get_prandom_u32());
		if (!put(ctx, ETH_HLEN, &ip, sizeof(ip), xdp))
			return REASON_INTERNAL;
	}
	icmp.check = ~fold16(sum);
	if (!put(ctx, at + ICMP_CHECK, &icmp.check, 2, xdp))
		return REASON_INTERNAL;
	have = p->frame_len + outer + inner + ICMP_SIZE - (q->l4_at - ETH_HLEN);
	at += ICMP_SIZE;
	if (e.len && e.want != e.field) {
		if (!BY_HOOK(move_extension, ctx, at + e.field, at + e.want, e.len))
			return REASON_INTERNAL;
		if (e.want > e.field)
			have += e.want - e.field;
	}
	return truncate(ctx, have, ETH_HLEN + outer + len, xdp) ? REASON_NONE : REASON_INTERNAL;
}

// Returns the pool address that represents an IPv6 router. A router always has the same address.
// Neighbouring routers have different ones, so that a traceroute does not look like a loop (RFC
// 6791 §3.2).
static __always_inline union addr pool_source(const union addr *router, const struct plan *plan)
{
	__u32 place = 0;
	union addr a = {};

	for (int i = 0; i < 4; i++)
		place += bpf_ntohl(router->w[i]);
	a.w[0] = bpf_htonl(bpf_ntohl(plan->pool) + place % plan->pool_len);
	return a;
}

static __always_inline void error_source_siit(union addr *from, const struct packet *p, const struct plan *plan)
{
	struct prefix *by = prefix_of(&p->tuple.saddr, ROLE_CROSSING, true);
	__u32 ifindex = leaves_by(p, plan);
	struct interface_addr *own;

	if (by && by->kind != PREFIX_NAT64 && by->rule == plan->owner) {
		*from = p->tuple.saddr;
		cross_address(from, by, true);
		if (!nowhere4(from->w[0]))
			return;
	}
	if (plan->pool_len) {
		*from = pool_source(&p->tuple.saddr, plan);
		return;
	}
	own = bpf_map_lookup_elem(&interfaces, &ifindex);
	if (own && own->v4.w[0])
		*from = own->v4;
}

// Returns the source of a rewritten error within one family. It is the translated address if the
// quoted destination is translated, otherwise the router.
static __always_inline const union addr *error_source_within(const struct packet *p, const struct plan *plan,
							     const struct packet *about)
{
	bool same = !__builtin_memcmp(&about->tuple.saddr, &plan->to.saddr, sizeof(about->tuple.saddr));

	return same ? &p->tuple.saddr : &plan->to.saddr;
}

// Sets the source of a rewritten error. A router on a translated side must not be visible; the
// translated address of the flow replaces it (RFC 5508 REQ-5c). Between the families, a router with
// a translated address keeps it (RFC 7915 §4.1, §5.1). For siit, an address of the rule's pool or
// of this host represents an IPv6 router without one (RFC 6791 §3).
static __always_inline void error_source(union addr *from, const struct packet *p, const struct plan *plan,
					 const struct packet *about)
{
	if (plan->family == p->family) {
		*from = *error_source_within(p, plan, about);
		return;
	}
	*from = plan->to.saddr;
	if (plan->family == FAMILY_6) {
		struct prefix *by = prefix_of(&p->tuple.saddr, ROLE_CROSSING, false);

		if (plan->owner_nat == OWNER_STATELESS && by && by->rule == plan->owner) {
			*from = p->tuple.saddr;
			cross_address(from, by, false);
			return;
		}
		by = prefix_of(&plan->to.saddr, ROLE_CROSSING, true);
		if (!by || !by->embed_len)
			return;
		// If the host is behind another rule, the receiver knows only its outside address.
		if (plan->owner_nat != OWNER_STATELESS &&
		    extract(&plan->to.saddr, by->embed_len) != about->tuple.saddr.w[0])
			return;
		embed(from, &by->embed, by->embed_len, p->tuple.saddr.w[0]);
		return;
	}
	if (plan->owner_nat == OWNER_STATELESS)
		error_source_siit(from, p, plan);
}

// Restores the backend's sequence number in a quoted segment of a spliced connection. The segment
// was sent with the numbers of the cookie. The backend accepts errors only with its own numbers
// (RFC 5927 §4.1).
static __always_inline int unsplice(void *ctx, const struct packet *p, const struct plan *plan, const bool xdp)
{
	struct work *w = the_work();
	__u16 check, was = 0, is = 0;
	const struct quote *q;
	__u32 key, at;
	struct adjust *a;
	__be32 from, to;

	if (!w)
		return 0;
	q = &w->quote;
	key = plan->record;
	at = quoted_check(q);
	a = bpf_map_lookup_elem(&adjusts, &key);
	if (!a || (a->flags & (ADJUST_COOKIE | ADJUST_HEARD)) != (ADJUST_COOKIE | ADJUST_HEARD) ||
	    q->l4_at + 8 > q->end)
		return 1;
	if (!get(ctx, q->l4_at + 4, &from, 4, xdp))
		return 0;
	to = bpf_htonl(bpf_ntohl(from) - a->ahead);
	if (!put(ctx, q->l4_at + 4, &to, 4, xdp))
		return 0;
	if (at) {
		if (!get(ctx, at, &was, 2, xdp))
			return 0;
		is = check_after(was, change(from, to));
		if (!put(ctx, at, &is, 2, xdp))
			return 0;
	}
	if (!get(ctx, p->l4_off + ICMP_CHECK, &check, 2, xdp))
		return 0;
	check = check_after(check, change(from, to) + change(was, is));
	return put(ctx, p->l4_off + ICMP_CHECK, &check, 2, xdp);
}

BOTH_HOOKS(int, unsplice, p && plan ? unsplice(ctx, p, plan, xdp) : 0, const struct packet *p, const struct plan *plan)

// One function for each direction, because their stack frames are large.
#define ERROR_FUNCTION(name, context, call)                                    \
	__noinline enum reason name(context *ctx, struct packet *p, struct plan *plan) \
	{                                                                      \
		struct work *w = the_work();                                   \
                                                                               \
		if (!p || !plan || !w)                                         \
			return REASON_INTERNAL;                                \
		error_source(&w->from, p, plan, &w->about);                    \
		return call;                                                   \
	}

ERROR_FUNCTION(xdp_error_in4, struct xdp_md, rewrite_error(ctx, p, plan, &w->quote, &w->from, false, true))
ERROR_FUNCTION(xdp_error_in6, struct xdp_md, rewrite_error(ctx, p, plan, &w->quote, &w->from, true, true))
ERROR_FUNCTION(xdp_error_to6, struct xdp_md, translate_error(ctx, p, plan, &w->quote, &w->from, plan->mtu, true, true))
ERROR_FUNCTION(xdp_error_to4, struct xdp_md, translate_error(ctx, p, plan, &w->quote, &w->from, plan->mtu, false, true))
ERROR_FUNCTION(tc_error_in4, struct __sk_buff, rewrite_error(ctx, p, plan, &w->quote, &w->from, false, false))
ERROR_FUNCTION(tc_error_in6, struct __sk_buff, rewrite_error(ctx, p, plan, &w->quote, &w->from, true, false))
ERROR_FUNCTION(tc_error_to6, struct __sk_buff,
	       translate_error(ctx, p, plan, &w->quote, &w->from, plan->mtu, true, false))
ERROR_FUNCTION(tc_error_to4, struct __sk_buff,
	       translate_error(ctx, p, plan, &w->quote, &w->from, plan->mtu, false, false))

static __always_inline enum reason apply_error(void *ctx, struct packet *p, struct plan *plan, const bool xdp)
{
	if (have_cookies && plan->edits & EDIT_SPLICE && !BY_HOOK(unsplice, ctx, p, plan))
		return REASON_INTERNAL;
	if (!have_family_change || plan->family == p->family)
		return p->family == FAMILY_6 ? BY_HOOK(error_in6, ctx, p, plan) : BY_HOOK(error_in4, ctx, p, plan);
	return p->family == FAMILY_6 ? BY_HOOK(error_to4, ctx, p, plan) : BY_HOOK(error_to6, ctx, p, plan);
}

#endif
