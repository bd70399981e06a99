// SPDX-License-Identifier: Apache-2.0

package trace

//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel -type drop_key -type drop_count -type drop_sample -type drop_tuple -type drop_hook -type drop_ct drops ../bpf/trace/drops.bpf.c
//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel -type profile_key -type profile_stack profile ../bpf/trace/profile.bpf.c
//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel -type asked_port ports ../bpf/trace/ports.bpf.c
//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel -type loss_key -type loss_kind losses ../bpf/trace/losses.bpf.c
//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel -type packet_event -type packet_point -type packet_counter observe ../bpf/trace/observe.bpf.c
