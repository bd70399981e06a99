// SPDX-License-Identifier: Apache-2.0

// Package docs holds the pages that the program itself shows.
package docs

import _ "embed"

//go:generate go run ../config/reference reference

// Schema is the JSON Schema of a configuration file, draft 2020-12.
//
//go:embed reference/sluice.schema.json
var Schema []byte
