// SPDX-License-Identifier: Apache-2.0

package accelerate

//go:generate go tool bpf2go -cc clang-19 -target bpfel -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -idirafter /usr/include/x86_64-linux-gnu" -type flow_key -type flow_entry -type candidate -type port -type exclusion -type slow -type port_flag -type counter -type limit programs ../bpf/accelerate/accelerate.bpf.c
