// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Expiry of flows: a timer walks over the tables in steps. It is pinned with its map and continues
// without the daemon.
#ifndef SLUICE_SWEEP_H
#define SLUICE_SWEEP_H

#include <linux/errno.h>

#include "flow/ending.h"

#define SWEEP_TICK_MS 10
#define CLOCK_MONOTONIC 1

// Takes over the charges of a flow that still apply.
static __always_inline void take_debts(struct ending *end, struct entry_meta *m)
{
	__u32 was = take_charges(m);

	end->flags = (end->flags & ~ENTRY_HALF_OPEN) | (was & ENTRY_HALF_OPEN);
	end->heard = (end->heard & ~HEARD_CLOSED) | (was >> HEARD_SHIFT & HEARD_CLOSED);
}

// Reports whether both directions have been idle for longer than a timeout. The function later()
// would be wrong here: one direction may have been idle for more than half of the clock's range.
static __always_inline bool silent(const struct ending *end, __u32 timeout)
{
	return elapsed(end->now, end->own_seen, timeout) && elapsed(end->now, end->twin_seen, timeout);
}

static __always_inline bool opened_again(const struct ending *end)
{
	return end->l4_proto == IPPROTO_TCP && !(end->flags & ENTRY_NAT) &&
	       used_again(end->backend, end->heard, end->own_seen, end->twin_heard, end->twin_seen,
			  end->twin != NO_ENTRY);
}

static __always_inline void sweep_flow(void *e, __u32 index, __u32 now, __u32 why, const bool v6)
{
	enum entry_state state = ENTRY_DEAD;
	struct ending end = {};
	void *twin;

	if (!(meta_of(e, v6)->flags & ENTRY_PRIMARY))
		return;
	gather_primary(&end, e, v6);
	end.twin_seen = end.own_seen; // a flow of one direction counts for both, as in conn_update
	end.twin_heard = end.heard;
	if (end.twin != NO_ENTRY) {
		if (end.twin_family == FAMILY_6) {
			twin = entry_at(end.twin, true);
			if (twin)
				gather_twin(&end, twin, true);
		} else {
			twin = entry_at(end.twin, false);
			if (twin)
				gather_twin(&end, twin, false);
		}
	}
	end.now = now;
	if (why != SWEEP_END && !(why == SWEEP_OPENS && opened_again(&end)) && !owner_gone(&end) &&
	    (!silent(&end, timeout_of(&end)) || probe(&end, e, index, v6)))
		return;
	if (made_with_binding(meta_of(e, v6))) {
		end.ref = binding_leave(index, v6);
		if (end.ref == NO_ENTRY)
			return; // the CPU that created the entry is removing it
		if (end.ref == index) {
			state = ENTRY_HOLD;
			end.flags &= ~ENTRY_BOUND;
		}
	}
	if (!take_life(e, now, state, v6))
		return;
	if (cut_off(&end)) {
		remember_ended(index, (__u32)end.owner << 16 | end.backend, v6);
		remember_ended(end.twin, (__u32)end.owner << 16 | end.backend, end.twin_family == FAMILY_6);
	}
	if (end.twin != NO_ENTRY)
		kill_index(end.twin, now, ENTRY_DEAD, end.twin_family == FAMILY_6);
	take_debts(&end, meta_of(e, v6));
	release_flow(&end);
	if ((end.heard | end.twin_heard) & HEARD_EDITED) {
		index |= v6 ? ADJUST_6 : 0;
		bpf_map_delete_elem(&adjusts, &index);
	}
}

// Reports whether more than three quarters of a table were in use at the last sweep.
static __always_inline bool crowded(const bool v6)
{
	__u32 zero = 0;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);
	struct control *c = the_control();

	return c && stock && (v6 ? c->used6 : c->used4) > stock->room - stock->room / 4;
}

// Ends a permit. It lives as long as its binding; the port has no new owner for at least one sweep
// after that. A binding may live for weeks and have millions of peers. When the table is nearly
// full, permits without a new flow for the UDP timeout also end.
static __always_inline void sweep_permit(void *e, __u32 now, const bool v6)
{
	__u32 slot = meta_of(e, v6)->twin, *owner = owner_at(slot);

	if (!owner || !*owner || (elapsed(now, meta_of(e, v6)->seen, timeout_udp) && crowded(v6)))
		kill(e, now, ENTRY_DEAD, v6);
}

// Frees the port that a dead entry held.
static __always_inline void sweep_port(void *e, const struct tuple *key, const bool v6)
{
	struct entry_meta *m = meta_of(e, v6);
	__u32 slot = slot_of(e, v6);

	if (key->kind == KIND_BINDING ? m->flags & ENTRY_CLIENT : m->heard & HEARD_CHARGED)
		client_port_put(&key->saddr, key->kind == KIND_BINDING ? key->zone : m->owner);
	give_port(slot >> 16, slot & 0xffff);
}

static __always_inline void sweep_dead(__u32 index, __u32 now, __u32 state, const bool v6)
{
	void *e = entry_at(index, v6);
	struct tuple key = {};
	struct entry_meta *m;

	if (!e)
		return;
	m = meta_of(e, v6);
	if (!later(now, m->seen + (state == ENTRY_HOLD && hold_ticks > hz ? hold_ticks : hz)))
		return;
	key_of_entry(&key, e, v6);
	if (state == ENTRY_HOLD)
		sweep_port(e, &key, v6);
	if (key.kind != KIND_FLOW || !made_with_binding(m)) {
		release_index(&key, index, v6);
		return;
	}
	unindex(&key, index, v6);
	key_of_binding(&key, e, v6);
	unindex(&key, index, v6);
	give(index, v6);
}

// Separate functions, so that their stack frames do not add to the one of the end of a flow.
__noinline int sweep_dead4(__u32 index, __u32 now, __u32 state)
{
	sweep_dead(index, now, state, false);
	return 0;
}

__noinline int sweep_dead6(__u32 index, __u32 now, __u32 state)
{
	sweep_dead(index, now, state, true);
	return 0;
}

static __always_inline void sweep_entry(__u32 index, __u32 now, __u32 why, const bool v6)
{
	void *e = entry_at(index, v6);
	__u32 word;
	__u8 kind;

	if (!e)
		return;
	word = *(volatile __u32 *)state_word(e, v6);
	kind = word >> 8;
	switch (word >> STATE_SHIFT) {
	case ENTRY_LIVE:
		if (kind == KIND_FLOW)
			sweep_flow(e, index, now, why, v6);
		else if (kind == KIND_PERMIT)
			sweep_permit(e, now, v6);
		break;
	case ENTRY_DEAD:
	case ENTRY_HOLD:
		if (v6)
			sweep_dead6(index, now, word >> STATE_SHIFT);
		else
			sweep_dead4(index, now, word >> STATE_SHIFT);
		break;
	case ENTRY_RETURNING:
		give(index, v6);
		break;
	}
}

__noinline int sweep_one4(__u32 index, __u32 now, __u32 why)
{
	sweep_entry(index, now, why, false);
	return 0;
}

__noinline int sweep_one6(__u32 index, __u32 now, __u32 why)
{
	sweep_entry(index, now, why, true);
	return 0;
}

struct sweep {
	__u32 first;
	__u32 now;
	__u32 used;
};

static __always_inline int sweep_nth(__u32 i, struct sweep *s, const bool v6)
{
	__u32 index = s->first + i;
	void *e = entry_at(index, v6);

	if (!e)
		return 1;
	if (!*state_word(e, v6))
		return 0;
	s->used++;
	if (v6)
		sweep_one6(index, s->now, SWEEP_PASS);
	else
		sweep_one4(index, s->now, SWEEP_PASS);
	return 0;
}

static long sweep_nth4(__u32 i, void *ctx)
{
	return sweep_nth(i, ctx, false);
}

static long sweep_nth6(__u32 i, void *ctx)
{
	return sweep_nth(i, ctx, true);
}

// Returns the number of entries that were ever used. Later entries need no sweep.
static __always_inline __u32 entries_used(const bool v6)
{
	__u32 zero = 0;
	struct stock *stock = v6 ? bpf_map_lookup_elem(&stock6, &zero) : bpf_map_lookup_elem(&stock4, &zero);

	if (!stock)
		return 0;
	return stock->fresh < stock->room ? stock->fresh : stock->room;
}

// Sweeps one part of a table. The pace decides its size.
static __always_inline void sweep_part(struct control *c, __u32 now, const bool v6)
{
	__u32 total = entries_used(v6);
	__u32 part = (__u64)total * SWEEP_TICK_MS / (sweep_ms ? sweep_ms : 1) + 1;
	__u32 *next = v6 ? &c->sweep6 : &c->sweep4;
	__u32 *counted = v6 ? &c->count6 : &c->count4;
	struct sweep s = { .first = *next, .now = now };

	if (s.first >= total)
		s.first = 0;
	if (part > total - s.first)
		part = total - s.first;
	if (v6)
		bpf_loop(part, sweep_nth6, &s, 0);
	else
		bpf_loop(part, sweep_nth4, &s, 0);
	*counted += s.used;
	*next = s.first + part;
	if (*next < total)
		return;
	*next = 0;
	if (v6) {
		c->used6 = *counted;
		c->swept6++;
	} else {
		c->used4 = *counted;
		c->swept4++;
	}
	*counted = 0;
}

static int sweep_tick(void *map, __u32 *key, struct sweeper *s)
{
	struct control *c = the_control();
	__u32 now = now_ticks();

	(void)map;
	(void)key;
	if (c) {
		sweep_part(c, now, false);
		sweep_part(c, now, true);
	}
	bpf_timer_start(&s->timer, SWEEP_TICK_MS * 1000000ULL, 0);
	return 0;
}

// Starts the timer, or makes it call this program; user space runs it. Returns the error of the
// kernel, or 0.
SEC("syscall")
int sweep_start(void *ctx)
{
	__u32 zero = 0;
	struct sweeper *s = bpf_map_lookup_elem(&sweepers, &zero);
	long err;

	(void)ctx;
	if (!s)
		return -ENOENT;
	err = bpf_timer_init(&s->timer, &sweepers, CLOCK_MONOTONIC);
	if (err && err != -EBUSY) // already initialized
		return err;
	err = bpf_timer_set_callback(&s->timer, sweep_tick);
	return err ?: bpf_timer_start(&s->timer, SWEEP_TICK_MS * 1000000ULL, 0);
}

// Sweeps both tables completely; user space runs it.
SEC("syscall")
int sweep_all(void *ctx)
{
	struct sweep s4 = { .now = now_ticks() }, s6 = { .now = now_ticks() };

	(void)ctx;
	bpf_loop(entries_used(false), sweep_nth4, &s4, 0);
	bpf_loop(entries_used(true), sweep_nth6, &s6, 0);
	return 0;
}

struct victim {
	__u32 index; // index of the opener's entry
	__u32 v6;
};

// Ends a flow before its timeout and releases its resources; user space runs it.
SEC("syscall")
int sweep_end(struct victim *ctx)
{
	if (ctx->v6)
		sweep_one6(ctx->index, now_ticks(), SWEEP_END);
	else
		sweep_one4(ctx->index, now_ticks(), SWEEP_END);
	return 0;
}

// Stops the timer; user space runs it before it removes the maps.
SEC("syscall")
int sweep_stop(void *ctx)
{
	__u32 zero = 0;
	struct sweeper *s = bpf_map_lookup_elem(&sweepers, &zero);

	(void)ctx;
	return s ? bpf_timer_cancel(&s->timer) < 0 : 1;
}

struct clocks {
	__u64 ticks;
	__u64 ns;
};

// Returns the time in ticks; user space runs it twice to measure a tick.
SEC("syscall")
int read_clocks(struct clocks *ctx)
{
	ctx->ticks = bpf_jiffies64();
	ctx->ns = bpf_ktime_get_ns();
	return 0;
}

#endif
