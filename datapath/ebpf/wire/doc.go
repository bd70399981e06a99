// SPDX-License-Identifier: Apache-2.0

// Package wire has the types and constants that the BPF programs and Go share, generated from the BTF
// of the object, and the conversions between them and Go's values.
package wire
