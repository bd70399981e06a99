// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// Types for user space. Go (datapath/ebpf) reads them from the BTF of the object: enumerations
// become constants, structures that no map contains become types. BTF contains a type only if a
// symbol uses it. Each type therefore has a pointer here that no program uses.
#ifndef SLUICE_EXPORT_H
#define SLUICE_EXPORT_H

#include "flow/reindex.h"
#include "maps.h"
#include "nat/binding.h"

const enum action *export_action __attribute__((unused));
const enum reason *export_reason __attribute__((unused));
const enum family *export_family __attribute__((unused));
const enum mode *export_mode __attribute__((unused));
const enum scheduler *export_scheduler __attribute__((unused));
const enum filtering *export_filtering __attribute__((unused));
const enum entry_kind *export_entry_kind __attribute__((unused));
const enum entry_state *export_entry_state __attribute__((unused));
const enum encap *export_encap __attribute__((unused));
const enum answer *export_answer __attribute__((unused));
const enum prefix_kind *export_prefix_kind __attribute__((unused));
const enum prefix_role *export_prefix_role __attribute__((unused));
const enum event_kind *export_event_kind __attribute__((unused));
const struct block_event *export_block_event __attribute__((unused));
const struct mapping_request *export_mapping_request __attribute__((unused));
const struct flow_request *export_flow_request __attribute__((unused));
const struct reindex *export_reindex __attribute__((unused));
// Values of inner maps.
const struct bucket *export_bucket __attribute__((unused));
const struct flow4 *export_flow4 __attribute__((unused));
const struct flow6 *export_flow6 __attribute__((unused));
const struct denied_line *export_denied_line __attribute__((unused));
const struct owner_pair *export_owner_pair __attribute__((unused));
const enum layout *export_layout __attribute__((unused));
const enum entry_flag *export_entry_flag __attribute__((unused));
const enum heard *export_heard __attribute__((unused));
const enum check *export_check __attribute__((unused));
const enum source_check *export_source_check __attribute__((unused));
const enum packet_flag *export_packet_flag __attribute__((unused));
const enum own_kind *export_own_kind __attribute__((unused));
const enum route_mtu_family *export_route_mtu_family __attribute__((unused));
const enum spliced *export_spliced __attribute__((unused));
const enum iface_key *export_iface_key __attribute__((unused));
const enum service_flag *export_service_flag __attribute__((unused));
const enum sticky_field *export_sticky_field __attribute__((unused));
const enum backend_state *export_backend_state __attribute__((unused));
const enum served *export_served __attribute__((unused));
const enum list *export_list __attribute__((unused));
const enum routed *export_routed __attribute__((unused));
const enum nat_flag *export_nat_flag __attribute__((unused));
const enum interface_key *export_interface_key __attribute__((unused));
const enum choice *export_choice __attribute__((unused));
const enum held_flag *export_held_flag __attribute__((unused));
const enum interface_flag *export_interface_flag __attribute__((unused));
const enum no_entry *export_no_entry __attribute__((unused));
const enum plan_flag *export_plan_flag __attribute__((unused));
const enum direct_place *export_direct_place __attribute__((unused));
const enum client_bits *export_client_bits __attribute__((unused));
const enum port_classes *export_port_classes __attribute__((unused));
const enum map_size *export_map_size __attribute__((unused));
const enum no_rule *export_no_rule __attribute__((unused));
const enum plan_owner *export_plan_owner __attribute__((unused));
const enum denied_layout *export_denied_layout __attribute__((unused));

#endif
