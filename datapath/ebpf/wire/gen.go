// SPDX-License-Identifier: Apache-2.0

package wire

//go:generate go run reasons_doc.go
//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -I../../../bpf/datapath -idirafter /usr/include/x86_64-linux-gnu" -type flow4 -type flow6 -type bucket -type owner_pair -type event -type block_event -type block_map -type held -type fragment_key -type mapping_request -type flow_request -type reindex -type tuple -type plan -type packet -type work wire ../../../bpf/datapath/datapath.bpf.c
//go:generate go run generate.go
