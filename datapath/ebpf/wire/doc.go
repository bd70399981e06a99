// SPDX-License-Identifier: Apache-2.0

// Package wire contains the types and constants shared by the BPF programs and Go, generated from the object's BTF,
// and their conversions to Go values.
package wire
