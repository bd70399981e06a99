// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Flows: creation, state changes by packets, end of TCP connections.
#ifndef SLUICE_CONN_H
#define SLUICE_CONN_H

#include "flow/stock.h"

static __always_inline void reverse_tuple(struct tuple *to, const struct tuple *t)
{
	to->saddr = t->daddr;
	to->daddr = t->saddr;
	to->sport = t->dport;
	to->dport = t->sport;
	to->l4_proto = t->l4_proto;
	to->kind = t->kind;
	to->zone = t->zone;
	to->state = ENTRY_LIVE;
}

// Writes the key and the rewrite of a claimed entry. The entry remains invisible.
static __always_inline void fill(void *e, const struct tuple *key, const struct tuple *to, const bool v6)
{
	if (v6) {
		struct flow6 *f = e;

		f->packets = 0;
		f->bytes = 0;
		f->key.saddr = key->saddr;
		f->key.daddr = key->daddr;
		f->key.sport = key->sport;
		f->key.dport = key->dport;
		*(__u32 *)&f->key.l4_proto = key->l4_proto | key->kind << 8 | key->zone << 16;
		f->to_saddr = to->saddr;
		f->to_daddr = to->daddr;
		f->to_sport = to->sport;
		f->to_dport = to->dport;
		return;
	}
	struct flow4 *f = e;

	f->packets = 0;
	f->bytes = 0;
	f->key.saddr = key->saddr.w[0];
	f->key.daddr = key->daddr.w[0];
	f->key.sport = key->sport;
	f->key.dport = key->dport;
	*(__u32 *)&f->key.l4_proto = key->l4_proto | key->kind << 8 | key->zone << 16;
	f->to_saddr = to->saddr.w[0];
	f->to_daddr = to->daddr.w[0];
	f->to_sport = to->sport;
	f->to_dport = to->dport;
}

static __always_inline void publish(void *e, const bool v6)
{
	__sync_fetch_and_or(state_word(e, v6), (__u32)ENTRY_LIVE << STATE_SHIFT);
}

static __always_inline bool fill_side(__u32 index, struct new_flow *b, __u32 twin, bool primary, const bool v6)
{
	void *e = entry_at(index, v6);
	struct entry_meta *m;

	if (!e)
		return false;
	if (primary)
		fill(e, &b->key, &b->to, v6);
	else
		fill(e, &b->back, &b->from, v6);
	m = meta_of(e, v6);
	m->twin = twin;
	m->seen = b->now;
	m->flags = b->flags;
	m->heard = 0;
	m->hop = 0;
	m->hop_gen = 0;
	if (primary) {
		m->flags |= ENTRY_PRIMARY;
		m->heard = b->heard | b->edited;
		m->owner = b->owner;
		m->backend = b->backend;
		((__u64 *)e)[0] = 1; // number of packets
		((__u64 *)e)[1] = b->bytes;
	} else {
		m->heard = b->back_edited;
		*ref_of(m) = b->ref == NO_ENTRY ? twin : b->ref; // the flow is the only one of its binding
	}
	return true;
}

__noinline int fill_pair(struct new_flow *b, __u32 mine, __u32 twin)
{
	bool ok;

	if (!b)
		return 0;
	if (b->family != b->to_family)
		b->flags |= ENTRY_CROSS;
	if (twin == NO_ENTRY)
		return b->family == FAMILY_6 ? fill_side(mine, b, twin, true, true) :
					       fill_side(mine, b, twin, true, false);
	ok = b->to_family == FAMILY_6 ? fill_side(twin, b, mine, false, true) : fill_side(twin, b, mine, false, false);
	if (!ok)
		return 0;
	return b->family == FAMILY_6 ? fill_side(mine, b, twin, true, true) : fill_side(mine, b, twin, true, false);
}

static __always_inline void publish_index(__u32 index, bool v6)
{
	void *e;

	if (v6) {
		e = entry_at(index, true);
		if (e)
			publish(e, true);
	} else {
		e = entry_at(index, false);
		if (e)
			publish(e, false);
	}
}

static __always_inline void kill_index(__u32 index, __u32 now, enum entry_state state, bool v6)
{
	void *e;

	if (v6) {
		e = entry_at(index, true);
		if (e)
			kill(e, now, state, true);
	} else {
		e = entry_at(index, false);
		if (e)
			kill(e, now, state, false);
	}
}

static __always_inline void release_index(const struct tuple *t, __u32 index, bool v6)
{
	if (v6)
		release6(t, index);
	else
		release4(t, index);
}

#define RIVAL_LOOKS 16 // these take longer than another CPU needs between publishing and withdrawing a flow

// Returns the flow that remains when several CPUs publish flows with the same key at the same time.
// mine: the flow just published; twin: its other entry, which has the same key if a host sends to
// itself. If two CPUs see each other's flow, the flow found first by searches remains, and the
// other CPU withdraws its own. If the other CPU does not withdraw, it searched before this flow was
// visible. Packets may then have used its flow, so that its flow remains.
__noinline __u32 first_flow(const struct tuple *key, __u32 mine, __u32 twin, bool v6)
{
	__u32 other = NO_ENTRY, first;

	if (!key)
		return mine;
#pragma clang loop unroll(disable)
	for (int i = 0; i < RIVAL_LOOKS; i++) {
		other = rival(key, mine, v6);
		if (other == NO_ENTRY || other == twin)
			return mine;
		first = find(key, v6);
		if (first != mine && first != NO_ENTRY)
			return first;
	}
	return other;
}

// flags, heard and hop share a word. Only flags are written by both directions.
static __always_inline __u32 *flags_word(struct entry_meta *m)
{
	return (__u32 *)&m->flags;
}

// Position of entry_meta.heard within flags_word.
#define HEARD_SHIFT 8

// Marks a dead flow as closed, with a complete handshake. A packet that found the flow before its
// death may complete the handshake or close the connection concurrently. The CPU that changes a bit
// releases its charge. Returns the previous ENTRY_HALF_OPEN, and HEARD_CLOSED at HEARD_SHIFT.
static __always_inline __u32 take_charges(struct entry_meta *m)
{
	__u32 half_open = __sync_fetch_and_and(flags_word(m), ~ENTRY_HALF_OPEN) & ENTRY_HALF_OPEN;

	return half_open |
	       (__sync_fetch_and_or(flags_word(m), HEARD_CLOSED << HEARD_SHIFT) & HEARD_CLOSED << HEARD_SHIFT);
}

// Withdraws a new flow in favour of the flow "found" of another CPU; NO_ENTRY if its packet is
// dropped. Packets on the other CPU may have found the new flow. The charges that they have released
// are removed from b->flags. Returns the flow that remains. That is the new flow if the sweeper has
// ended it, with all its charges, or if the other CPU has withdrawn its flow as well: a CPU that was
// interrupted between first_flow and this function is later than RIVAL_LOOKS.
static __always_inline __u32 withdraw(struct new_flow *b, __u32 found, __u32 twin, bool to_v6, const bool v6)
{
	const __u32 other = found;
	void *e = entry_at(b->index, v6);
	__u32 was;

	if (!e || !take_life(e, b->now, ENTRY_DEAD, v6))
		return b->index;
	// Each CPU kills its flow before it searches. If one finds the flow of the other, the other
	// does not find this flow, and keeps its own. If none finds a flow, the one with the lower
	// index keeps its own, and the other CPU finds it.
	if (other != NO_ENTRY) {
#pragma clang loop unroll(disable)
		for (int i = 0; i < RIVAL_LOOKS; i++) {
			found = rival(&b->key, v6 == to_v6 ? twin : NO_ENTRY, v6);
			if (found != NO_ENTRY || b->index < other)
				break;
		}
		if (found == NO_ENTRY && revive(e, v6))
			return b->index;
	}
	if (twin != NO_ENTRY)
		kill_index(twin, b->now, ENTRY_DEAD, to_v6);
	was = take_charges(meta_of(e, v6));
	if (!(was & ENTRY_HALF_OPEN))
		b->flags &= ~ENTRY_HALF_OPEN;
	if (was & HEARD_CLOSED << HEARD_SHIFT && !(b->flags & ENTRY_NAT)) {
		b->flags &= ~ENTRY_CLIENT;
		b->uncounted = 1;
	}
	return found;
}

// Creates both entries of a flow, or none. Returns REASON_NEW_FLOW, or REASON_FLOW if another CPU
// has created it (index is then the entry of that flow), REASON_CLASH or REASON_TABLE_FULL. On
// failure, the caller releases the charges that remain in b->flags.
__noinline enum reason make_flow(struct new_flow *b)
{
	bool v6, to_v6;
	__u32 mine, twin, found;

	if (!b)
		return REASON_INTERNAL;
	v6 = b->family == FAMILY_6;
	to_v6 = b->to_family == FAMILY_6;
	if (!b->one_way && find(&b->back, to_v6) != NO_ENTRY) {
		b->index = find(&b->key, v6);
		return b->index == NO_ENTRY ? REASON_CLASH : REASON_FLOW;
	}
	mine = claim(&b->key, v6);
	if (mine == NO_ENTRY)
		return REASON_TABLE_FULL;
	twin = NO_ENTRY;
	if (!b->one_way) {
		twin = claim(&b->back, to_v6);
		if (twin == NO_ENTRY) {
			release_index(&b->key, mine, v6);
			return REASON_TABLE_FULL;
		}
	}
	if (!fill_pair(b, mine, twin)) {
		release_index(&b->key, mine, v6);
		if (twin != NO_ENTRY)
			release_index(&b->back, twin, to_v6);
		return REASON_INTERNAL;
	}
	if (twin != NO_ENTRY)
		publish_index(twin, to_v6);
	publish_index(mine, v6);
	b->index = mine;
	if (b->ref == NO_ENTRY)
		return REASON_NEW_FLOW; // binding_hold checks for a flow of another CPU
	found = first_flow(&b->key, mine, v6 == to_v6 ? twin : NO_ENTRY, v6);
	// A portless NAT flow has no port of its own. Two CPUs may create flows with the same reply
	// key.
	if (found == mine && (b->flags & (ENTRY_NAT | ENTRY_BOUND)) == ENTRY_NAT &&
	    first_flow(&b->back, twin, mine, to_v6) != twin)
		found = NO_ENTRY;
	if (found != mine)
		found = v6 ? withdraw(b, found, twin, to_v6, true) : withdraw(b, found, twin, to_v6, false);
	if (found == mine)
		return REASON_NEW_FLOW;
	b->index = found;
	return found == NO_ENTRY ? REASON_CLASH : REASON_FLOW;
}

// Reserves a place in the quota of half-open flows. Returns false if the quota is used up.
static __always_inline bool half_open_take(struct control *c)
{
	if (c->half_open >= half_open_max)
		return false;
	__sync_fetch_and_add(&c->half_open, 1);
	return true;
}

static __always_inline void half_open_give(struct control *c)
{
	__sync_fetch_and_sub(&c->half_open, 1);
}

// Marks a direction as settled. The first settled direction completes the handshake.
static __always_inline void settle(struct entry_meta *m, struct entry_meta *twin)
{
	struct entry_meta *primary = m->flags & ENTRY_PRIMARY ? m : twin;
	struct control *c = the_control();

	__sync_fetch_and_or(flags_word(m), ENTRY_SETTLED);
	if (!(primary->flags & ENTRY_HALF_OPEN))
		return;
	if (__sync_fetch_and_and(flags_word(primary), ~ENTRY_HALF_OPEN) & ENTRY_HALF_OPEN && c)
		half_open_give(c);
}

static __always_inline struct entry_meta *twin_meta(struct entry_meta *m, bool v6)
{
	bool there = v6 != !!(m->flags & ENTRY_CROSS);
	void *e;

	if (there) {
		e = entry_at(m->twin, true);
		return e ? meta_of(e, true) : (void *)0;
	}
	e = entry_at(m->twin, false);
	return e ? meta_of(e, false) : (void *)0;
}

static __always_inline bool later(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

// Reports whether a TCP connection has ended: after both FINs, or after a reset without more data
// from the other side for one second (RFC 6146 §3.5.2.2, TRANS).
static __always_inline bool tcp_over(__u8 heard, __u32 seen, __u8 twin_heard, __u32 twin_seen)
{
	return heard & twin_heard & HEARD_FIN || (heard & HEARD_RST && !later(twin_seen, seen + hz)) ||
	       (twin_heard & HEARD_RST && !later(seen, twin_seen + hz));
}

#define NOT_TCP 0x100 // in place of TCP flags: a packet of another protocol

// Updates the state of a flow for a packet that is not plain (see conn_plain). m: the entry of the
// packet's direction, of family v6. Returns 1 if the packet has closed the flow.
__noinline int conn_update(struct entry_meta *m, __u32 tcp_flags, __u32 v6)
{
	struct entry_meta *twin, *primary;
	__u32 before, set;
	__u8 heard;

	if (!m)
		return 0;
	twin = m->twin == NO_ENTRY ? m : twin_meta(m, v6);
	if (!twin)
		return 0;
	before = *(volatile __u8 *)&m->heard; // one read: bits that another CPU changes later must stay as they are
	heard = before;
	if (tcp_flags & NOT_TCP) {
		heard |= HEARD_ACK;
	} else if (tcp_flags & TCP_RST) {
		heard |= HEARD_RST;
	} else {
		heard &= ~HEARD_RST;
		if ((tcp_flags & (TCP_SYN | TCP_ACK)) == TCP_SYN && m->flags & ENTRY_PRIMARY &&
		    tcp_over(m->heard, m->seen, twin->heard, twin->seen)) {
			heard &= HEARD_KEPT; // the tuple is reused by a new connection
			__sync_fetch_and_and(flags_word(twin), ~((0xff & ~HEARD_KEPT) << HEARD_SHIFT | ENTRY_SETTLED));
			__sync_fetch_and_and(flags_word(m), ~ENTRY_SETTLED);
		}
		heard |= tcp_flags & TCP_SYN ? HEARD_SYN : HEARD_ACK;
		if (tcp_flags & TCP_FIN)
			heard |= HEARD_FIN;
	}
	set = heard & ~before; // atomic, because the other direction may close the flow at the same time
	if (before & ~heard)
		__sync_fetch_and_and(flags_word(m), ~((before & ~heard) << HEARD_SHIFT));
	if (set)
		__sync_fetch_and_or(flags_word(m), set << HEARD_SHIFT);
	// TCP is settled when both sides have acknowledged. A flow picked up in the middle is
	// settled when both sides have sent a packet. A reset settles nothing.
	if (!(m->flags & ENTRY_SETTLED) && (heard & (HEARD_ACK | HEARD_RST)) == HEARD_ACK &&
	    (twin->heard & (HEARD_ACK | HEARD_SYN)))
		settle(m, twin);
	if (tcp_flags & NOT_TCP || !(heard & HEARD_RST || heard & twin->heard & HEARD_FIN))
		return 0;
	primary = m->flags & ENTRY_PRIMARY ? m : twin;
	return !(__sync_fetch_and_or(flags_word(primary), HEARD_CLOSED << HEARD_SHIFT) & HEARD_CLOSED << HEARD_SHIFT);
}

static __always_inline bool conn_changed(const struct packet *p, struct entry_meta *m, const bool v6)
{
	return conn_update(m, p->tuple.l4_proto == IPPROTO_TCP ? p->tcp_flags : NOT_TCP, v6);
}

// Reports whether a packet changes only the time and the counters of its flow. For TCP, the flow
// must be settled.
static __always_inline bool conn_plain(const struct packet *p, const struct entry_meta *m)
{
	if (p->tuple.l4_proto != IPPROTO_TCP)
		return m->heard & HEARD_ACK;
	return (m->flags & ENTRY_SETTLED) && !(m->heard & (HEARD_RST | HEARD_FIN | HEARD_EDITED)) &&
	       !(p->tcp_flags & (TCP_SYN | TCP_FIN | TCP_RST));
}

#endif
