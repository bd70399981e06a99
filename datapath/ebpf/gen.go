// SPDX-License-Identifier: Apache-2.0

package ebpf

//go:generate go run reasons_doc.go
//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" -type action -type reason -type family -type mode -type scheduler -type filtering -type entry_kind -type entry_state -type encap -type answer -type prefix_kind -type prefix_role -type event_kind -type event -type block_event -type block_map -type held -type fragment_key -type mapping_request -type plan -type packet -type work wire ../../bpf/datapath.bpf.c
