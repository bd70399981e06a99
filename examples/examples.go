// SPDX-License-Identifier: Apache-2.0

// Package examples carries the example configurations in the binary, so that the demo runs
// anywhere.
package examples

import "embed"

// Files holds the example configurations.
//
//go:embed *.yaml
var Files embed.FS
