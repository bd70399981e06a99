// SPDX-License-Identifier: Apache-2.0

package load

//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" packets ../bpf/load/packets.bpf.c
//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" sink ../bpf/load/sink.bpf.c
//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" forward ../bpf/load/forward.bpf.c
//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" flows ../bpf/load/flows.bpf.c
