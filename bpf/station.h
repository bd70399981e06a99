// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Whether a frame is for this host: by its destination's hardware address, as the kernel looks
// at it (eth_type_trans; ip_forward forwards PACKET_HOST alone). Others come in where an
// interface is promiscuous, a mirror's target, or flooded by its switch.
#ifndef SLUICE_STATION_H
#define SLUICE_STATION_H

#include "event.h"

enum station {
	STATION_OWN,
	STATION_GROUP, // broadcast or multicast: the host may want it, nobody forwards it
	STATION_OTHER,
};

#define PACKET_HOST 0 // linux/if_packet.h
#define PACKET_BROADCAST 1
#define PACKET_MULTICAST 2

typedef __u64 __attribute__((may_alias)) word64;

// A frame's destination, in the high six bytes.
static __always_inline __u64 destination_of(const void *data)
{
	return *(const word64 *)data << 16;
}

// What own_stations does not tell: addresses of links that stand on the interface in this
// namespace (macvlan, VRRP), of the bridge or bond that it is a port of, and its own where
// another interface has its place.
__noinline int further_station(__u64 destination, __u32 ifindex)
{
	struct station_key key = {};

	if (destination >> 16 & 1)
		return STATION_GROUP;
	key.destination = destination;
	key.ifindex = ifindex;
	return bpf_map_lookup_elem(&stations, &key) ? STATION_OWN : STATION_OTHER;
}

// data: of a whole Ethernet header.
static __always_inline int xdp_station(struct xdp_md *ctx, const void *data)
{
	__u64 destination = destination_of(data), *own;
	__u32 ifindex = ctx->ingress_ifindex, at = ifindex & (MAX_STATIONS - 1);

	own = bpf_map_lookup_elem(&own_stations, &at);
	if (dry_run || (own && *own == (destination | (ifindex & 0xffff))))
		return STATION_OWN;
	return further_station(destination, ifindex);
}

static __always_inline int tc_station(struct __sk_buff *ctx)
{
	void *data = (void *)(long)ctx->data;

	if (dry_run || ctx->pkt_type == PACKET_HOST)
		return STATION_OWN;
	if (ctx->pkt_type == PACKET_BROADCAST || ctx->pkt_type == PACKET_MULTICAST)
		return STATION_GROUP;
	if (data + ETH_HLEN > (void *)(long)ctx->data_end)
		return STATION_OTHER;
	return further_station(destination_of(data), ctx->ingress_ifindex);
}

// ---- priority tags: VLAN 0 is the interface itself (IEEE 802.1Q §9.6) ----

struct vlan_header { // behind the addresses
	__be16 tpid;
	__be16 tci;
	__be16 type;
};

static __always_inline bool is_ip(__be16 type)
{
	return type == bpf_htons(ETH_P_IP) || type == bpf_htons(ETH_P_IPV6);
}

static __always_inline bool is_tag(__be16 tpid)
{
	return tpid == bpf_htons(ETH_P_8021Q) || tpid == bpf_htons(ETH_P_8021AD);
}

// The type of the IP packet behind a frame's priority tag; 0: there is none.
static __always_inline __be16 behind_priority(void *data, void *end)
{
	struct vlan_header *v = data + 2 * ETH_ALEN;

	if ((void *)(v + 1) > end || !is_tag(v->tpid) || v->tci & bpf_htons(0x0fff) || !is_ip(v->type))
		return 0;
	return v->type;
}

// Takes a priority tag off a frame. The type of its IP packet; 0: the frame has none, and is as
// it came.
__noinline int xdp_untag(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__be16 type = behind_priority(data, end);
	word32 *w = data;

	if (!type)
		return 0;
	if ((void *)(w + 4) > end)
		return 0;
	w[3] = w[2]; // twelve bytes of addresses go four further
	w[2] = w[1];
	w[1] = w[0];
	return bpf_xdp_adjust_head(ctx, 4) ? 0 : type;
}

__noinline int tc_untag(struct __sk_buff *ctx)
{
	__be16 type = ctx->protocol;

	if (ctx->vlan_present) { // beside the frame
		if (ctx->vlan_tci & 0x0fff || !is_ip(type))
			return 0;
	} else {
		type = behind_priority((void *)(long)ctx->data, (void *)(long)ctx->data_end);
		if (!type)
			return 0;
	}
	return bpf_skb_vlan_pop(ctx) ? 0 : type;
}

#endif
