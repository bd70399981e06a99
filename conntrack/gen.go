// SPDX-License-Identifier: Apache-2.0

package conntrack

//go:generate go tool bpf2go -cc clang-19 -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -mcpu=v3 -I/usr/include/x86_64-linux-gnu" -target bpfel walk ../bpf/conntrack/walk.bpf.c
