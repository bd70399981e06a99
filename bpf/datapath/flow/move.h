// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Takes over flows from nftables, together with their service.
#ifndef SLUICE_MOVE_H
#define SLUICE_MOVE_H

#include "service/service_flow.h"

static __always_inline struct flow_request *flow_request_of(struct xdp_md *ctx)
{
	struct flow_request *r = (void *)(long)ctx->data;

	return (void *)(r + 1) <= (void *)(long)ctx->data_end ? r : (void *)0;
}

// Records the TCP state that both sides of a flow reached while nftables had it.
static __always_inline void heard_before(struct entry_meta *m, struct entry_meta *twin, __u8 heard, bool open)
{
	__sync_fetch_and_or(flags_word(m), (__u32)heard << HEARD_SHIFT);
	__sync_fetch_and_or(flags_word(twin), (__u32)heard << HEARD_SHIFT);
	if (open) {
		settle(m, twin);
		settle(twin, m);
	}
}

// Makes a flow that nftables had. User space runs this program with the request in place of a
// frame.
SEC("xdp")
int flow_take(struct xdp_md *ctx)
{
	struct flow_request *r = flow_request_of(ctx);
	struct entry_meta *m = (void *)0, *twin;
	struct work *w = the_work();
	struct packet *p;
	struct plan *plan;
	__u8 heard, open;
	__u32 index;
	enum reason reason;
	void *e;
	bool v6;

	if (!r || !w)
		return XDP_ABORTED;
	p = &w->packet;
	plan = &w->plan;
	__builtin_memset(p, 0, sizeof(*p));
	__builtin_memset(plan, 0, sizeof(*plan));
	p->tuple = r->key;
	p->tuple.state = ENTRY_LIVE;
	p->family = plan->family = r->family;
	p->now = now_ticks();
	plan->to = r->to;
	plan->owner = r->owner;
	plan->backend = r->backend;
	plan->flags = PLAN_ADMITTED;
	heard = r->heard;
	open = r->open;
	v6 = r->family == FAMILY_6;
	reason = service_flow(p, plan, w, 0, 0);
	if (reason == REASON_NEW_FLOW) {
		index = w->new_flow.index;
		if (v6) {
			e = entry_at(index, true);
			if (e)
				m = meta_of(e, true);
		} else {
			e = entry_at(index, false);
			if (e)
				m = meta_of(e, false);
		}
		twin = m ? twin_meta(m, v6) : (void *)0;
		if (twin)
			heard_before(m, twin, heard, open);
	}
	r = flow_request_of(ctx);
	if (!r)
		return XDP_ABORTED;
	r->reason = reason;
	return XDP_PASS;
}

#endif
