// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Decides whether a frame is for this host, by its destination address as in the kernel
// (eth_type_trans; ip_forward forwards only PACKET_HOST). Other frames arrive on a promiscuous
// interface, on the target of a mirror, or when a switch floods.
#ifndef SLUICE_STATION_H
#define SLUICE_STATION_H

#include "event.h"
#include "packet/bytes.h"

enum station {
	STATION_OWN,
	STATION_GROUP, // broadcast or multicast: for the host at most, never forwarded
	STATION_OTHER,
};

#define PACKET_HOST 0 // linux/if_packet.h
#define PACKET_BROADCAST 1
#define PACKET_MULTICAST 2

typedef __u64 __attribute__((may_alias)) word64;

// Returns the destination address of a frame in the high six bytes.
static __always_inline __u64 destination_of(const void *data)
{
	return *(const word64 *)data << 16;
}

// Looks up addresses that are not in own_stations: addresses of links on top of the interface
// (macvlan, VRRP), and of the bridge or bond of a port. It also covers an interface that shares its
// element with another one.
__noinline int further_station(__u64 destination, __u32 ifindex)
{
	struct station_key key = {};

	if (destination >> 16 & 1)
		return STATION_GROUP;
	key.destination = destination;
	key.ifindex = ifindex;
	return bpf_map_lookup_elem(&stations, &key) ? STATION_OWN : STATION_OTHER;
}

// Classifies a frame. "data" points to a complete Ethernet header.
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

struct vlan_header { // header after the two hardware addresses
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

// Returns the type of the IP packet after a priority tag, or 0.
static __always_inline __be16 behind_priority(void *data, void *end)
{
	struct vlan_header *v = data + 2 * ETH_ALEN;

	if ((void *)(v + 1) > end || !is_tag(v->tpid) || v->tci & bpf_htons(0x0fff) || !is_ip(v->type))
		return 0;
	return v->type;
}

// Removes the priority tag of a frame. Returns the type of its IP packet, or 0 if the frame has no
// tag and is unchanged.
__noinline int xdp_untag(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	__be16 type = behind_priority(data, end);
	word32 *w = data;

	if (!type)
		return 0;
	if ((void *)(w + 4) > end)
		return 0;
	w[3] = w[2]; // move the twelve bytes of addresses by four
	w[2] = w[1];
	w[1] = w[0];
	return bpf_xdp_adjust_head(ctx, 4) ? 0 : type;
}

__noinline int tc_untag(struct __sk_buff *ctx)
{
	__be16 type = ctx->protocol;

	if (ctx->vlan_present) { // the tag is in the metadata of the socket buffer
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
