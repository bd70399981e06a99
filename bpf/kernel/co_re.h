// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#ifndef SLUICE_KERNEL_CO_RE_H
#define SLUICE_KERNEL_CO_RE_H

/* The loader relocates the members of such a structure by the kernel's BTF. */
#define CO_RE __attribute__((preserve_access_index))

#endif
