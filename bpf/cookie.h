// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SYN cookies (RFC 4987 §3.6) of the kernel's making, given while handshakes fill
// half of their quota or more. Nothing is kept for a SYN; the client's
// acknowledgement proves the cookie, opens the flow in the way of a SYN, and goes
// to the backend as one. splice.h brings the two handshakes together.
#ifndef SLUICE_COOKIE_H
#define SLUICE_COOKIE_H

#include "lb.h"

// How long the kernel may take a cookie: MAX_SYNCOOKIE_AGE times
// TCP_SYNCOOKIE_PERIOD (Linux, include/net/tcp.h). No longer after the last one
// was given an acknowledgement is held against it.
#define COOKIE_SECONDS 120

// Classes of MSS that a cookie tells apart: msstab of Linux, net/ipv4/syncookies.c
// and net/ipv6/syncookies.c.
#define COOKIE_CLASSES 4

// What leaves room for the address family of any backend: a packet of IPv4 grows
// by so much.
#define CROSSING_GROWTH (sizeof(struct ipv6hdr) - sizeof(struct iphdr))

// Whether a packet may ask for a cookie or prove one. A FIN is sent again.
static __always_inline bool may_prove(const struct packet *p)
{
	__u8 flags = p->tcp_flags & (TCP_SYN | TCP_ACK | TCP_RST);

	return p->tuple.l4_proto == IPPROTO_TCP &&
	       !(p->flags & (PACKET_FIRST_FRAGMENT | PACKET_LATER_FRAGMENT | PACKET_ERROR)) &&
	       (flags == TCP_ACK || (flags == TCP_SYN && !(p->tcp_flags & TCP_FIN)));
}

static __always_inline bool cookies_needed(void)
{
	struct control *c = the_control();

	return c && c->half_open >= half_open_max - half_open_max / 2;
}

// The headers as the kernel's helpers want them; only these fields are looked at.
static __always_inline void cookie_ends(struct cookie *k, const struct packet *p)
{
	struct ipv6hdr *ip6 = (void *)k->ip;
	struct iphdr *ip = (void *)k->ip;

	if (p->family == FAMILY_6) {
		__builtin_memcpy(&ip6->saddr, &p->tuple.saddr, 16);
		__builtin_memcpy(&ip6->daddr, &p->tuple.daddr, 16);
		return;
	}
	ip->saddr = p->tuple.saddr.w[0];
	ip->daddr = p->tuple.daddr.w[0];
}

// The MSS that a client is offered: what the link that it came by carries to a
// backend, and no more than it can take itself. Which backend is not known yet.
static __always_inline __u32 cookie_offer(const struct packet *p, const struct service *s, __u32 mss)
{
	__u32 ifindex = p->ifindex, less = sizeof(struct tcphdr), room;
	struct interface_addr *in = bpf_map_lookup_elem(&interfaces, &ifindex);

	if (p->family == FAMILY_6)
		less += sizeof(struct ipv6hdr);
	else
		less += sizeof(struct iphdr) + (s->mode == MODE_FULLNAT ? CROSSING_GROWTH : 0);
	room = in && in->mtu > less ? in->mtu - less : mss;
	return room < mss ? room : mss;
}

// What is added to a cookie for the client's own initial number: with it a cookie
// is good for that number alone, where the kernel would take one less for another
// class of MSS.
static __always_inline __u32 cookie_salt(__u32 isn)
{
	return isn * hash_multiplier >> 32;
}

static __always_inline int cookie_give(const struct packet *p, struct plan *plan, const struct service *s,
				       struct load *l, struct cookie *k)
{
	__u32 len = (k->tcp[12] >> 4) * 4;
	struct tcphdr *tcp = (void *)k->tcp;
	__s64 cookie;

	if (!cookies_needed())
		return REASON_NONE;
	bounded(len);
	if (len < sizeof(*tcp) || len > sizeof(k->tcp))
		return REASON_NONE;
	cookie = p->family == FAMILY_6 ? bpf_tcp_raw_gen_syncookie_ipv6((void *)k->ip, tcp, len) :
					 bpf_tcp_raw_gen_syncookie_ipv4((void *)k->ip, tcp, len);
	if (cookie < 0)
		return REASON_NONE;
	plan->record = (__u32)cookie + cookie_salt(bpf_ntohl(tcp->seq));
	plan->mtu = cookie_offer(p, s, (__u64)cookie >> 32);
	plan->answer = ANSWER_COOKIE;
	if (!dry_run && l->cookie != (p->now & ~1U)) // even: 0 stands for never
		l->cookie = p->now & ~1U;
	return REASON_COOKIE;
}

static __always_inline bool cookie_valid(struct cookie *k, const bool v6)
{
	struct tcphdr *tcp = (void *)k->tcp;

	return v6 ? !bpf_tcp_raw_check_syncookie_ipv6((void *)k->ip, tcp) :
		    !bpf_tcp_raw_check_syncookie_ipv4((void *)k->ip, tcp);
}

// The class of a cookie, -1 when it is none. The kernel only says whether one is
// valid. But the class is added to what is secret of it: so many numbers below a
// valid cookie are valid too.
static __always_inline int cookie_class(struct cookie *k, const bool v6)
{
	struct tcphdr *tcp = (void *)k->tcp;
	__be32 ack = tcp->ack_seq;
	int class = -1;

	for (int i = 0; i < COOKIE_CLASSES; i++) {
		tcp->ack_seq = bpf_htonl(bpf_ntohl(ack) - i);
		if (!cookie_valid(k, v6))
			break;
		class = i;
	}
	tcp->ack_seq = ack;
	return class;
}

static __always_inline __u32 class_mss(__u32 class, const bool v6)
{
	static const __u16 mss4[COOKIE_CLASSES] = { 536, 1300, 1440, 1460 };
	static const __u16 mss6[COOKIE_CLASSES] = { 1280 - 60, 1480 - 60, 1500 - 60, 9000 - 60 };

	return v6 ? mss6[class & 3] : mss4[class & 3];
}

static __always_inline int cookie_take(struct packet *p, struct plan *plan, const struct service *s,
				       const struct load *l, struct cookie *k)
{
	const bool v6 = p->family == FAMILY_6;
	struct tcphdr *tcp = (void *)k->tcp;
	__u32 seq = bpf_ntohl(tcp->seq);
	__be32 ack = tcp->ack_seq;
	int class = -1;

	if (!l->cookie || elapsed(p->now, l->cookie, COOKIE_SECONDS * hz))
		return REASON_NONE;
	// When its acknowledgement is lost a client probes the window of 0 with the byte
	// before its first one (Linux), which then is the only proof.
	for (__u32 i = 0; i < 2 && class < 0; i++) {
		tcp->seq = bpf_htonl(seq + i);
		tcp->ack_seq = bpf_htonl(bpf_ntohl(ack) - cookie_salt(seq + i - 1));
		class = v6 ? cookie_class(k, true) : cookie_class(k, false);
	}
	tcp->ack_seq = ack;
	if (class < 0)
		return cookies_needed() && !(s->flags & SERVICE_STRICT_TCP) ? REASON_BAD_COOKIE : REASON_NONE;
	k->mss = class_mss(class, v6);
	p->tcp_flags = TCP_SYN; // from here on it stands for the SYN
	plan->edits = EDIT_SPLICE;
	return REASON_NONE;
}

// Whether the connection that a SYN asks for may be opened by the proof of a cookie: the proof
// comes from a client that takes it for open. It only looks; the proof is what counts.
static __always_inline bool cookie_room(const struct packet *p, const struct service *s, const struct load *l, __u32 id)
{
	struct client_key who = {};
	struct client *c;

	if (service_full(p, id) != REASON_NONE || (s->rate_ns && rate_used_up(&l->tat, s->burst_ns)))
		return false;
	if (s->client_rate_ns) {
		client_of(&who, &p->tuple.saddr, id, p->family == FAMILY_6);
		c = bpf_map_lookup_elem(&client_rates, &who);
		if (c && rate_used_up(&c->tat, s->client_burst_ns))
			return false;
	}
	return schedule(p, id, HASH_ROOM) != NO_ENTRY;
}

// What a service with cookies does before it makes a flow of a packet. REASON_NONE:
// it does, or refuses in its own way.
__noinline int cookie_new(struct packet *p, struct plan *plan, __u32 id)
{
	struct service *s = bpf_map_lookup_elem(&services, &id);
	struct load *l = bpf_map_lookup_elem(&service_loads, &id);
	struct work *w = the_work();

	if (!have_cookies || !p || !plan || !s || !l || !w || !(s->flags & SERVICE_COOKIES) || !may_prove(p))
		return REASON_NONE;
	if (!(__u32)s->slots || service_lists(p, s) != REASON_NONE ||
	    (p->tcp_flags & TCP_SYN && !cookie_room(p, s, l, id)))
		return REASON_NONE; // service_new refuses it
	plan->owner = id;
	plan->owner_nat = OWNER_SERVICE;
	cookie_ends(&w->cookie, p);
	return p->tcp_flags & TCP_SYN ? cookie_give(p, plan, s, l, &w->cookie) : cookie_take(p, plan, s, l, &w->cookie);
}

// Notes for splice.h what the proof of a cookie has said.
__noinline int cookie_flow(const struct packet *p, struct plan *plan, __u32 reason)
{
	struct control *c = the_control();
	struct work *w = the_work();
	struct adjust a = { .flags = ADJUST_COOKIE };
	struct tcphdr *tcp;
	__u32 key;

	if (!p || !plan || !w || !c)
		return REASON_INTERNAL;
	if (reason == REASON_FLOW) // another CPU was faster
		return REASON_CLASH;
	if (reason != REASON_NEW_FLOW || dry_run)
		return reason;
	key = plan->record;
	tcp = (void *)w->cookie.tcp;
	a.base = bpf_ntohl(tcp->seq);
	a.cookie = bpf_ntohl(tcp->ack_seq) - 1;
	a.window = tcp->window;
	a.mss = w->cookie.mss;
	if (!(c->spliced & SPLICED_COOKIE))
		__sync_fetch_and_or(&c->spliced, SPLICED_COOKIE);
	return bpf_map_update_elem(&adjusts, &key, &a, BPF_ANY) ? REASON_TABLE_FULL : REASON_NEW_FLOW;
}

// Whether a flow was opened by a cookie; then what is changed in its packet. What
// a backend says before it has answered the SYN, but for a reset, belongs to an
// older connection: it is reset, as the client would do.
static __always_inline bool splice_edits(const struct packet *p, struct plan *plan, bool first,
					 const struct entry_meta *m, const struct entry_meta *twin)
{
	__u32 key = plan->record;
	struct adjust *a;

	if (!((first ? twin : m)->heard & HEARD_EDITED))
		return false;
	a = bpf_map_lookup_elem(&adjusts, &key);
	if (!a || !(a->flags & ADJUST_COOKIE))
		return false;
	if (!first && !(a->flags & ADJUST_HEARD) && !(p->tcp_flags & (TCP_SYN | TCP_RST)))
		plan->answer = ANSWER_RESET;
	plan->edits |= first ? EDIT_SPLICE : EDIT_SPLICED;
	return true;
}

#endif
