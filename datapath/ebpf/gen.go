// SPDX-License-Identifier: Apache-2.0

package ebpf

//go:generate go generate ./wire
