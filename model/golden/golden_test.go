// SPDX-License-Identifier: Apache-2.0

package golden

import (
	"testing"
)

const dir = "../../testdata/packets"

// TestModel runs every packet case on the reference model.
func TestModel(t *testing.T) {
	cases, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			if why, skip := c.Skip["model"]; skip {
				t.Skip(why)
			}
			if err := c.Run(&Model{Seed: 1}); err != nil {
				t.Error(err)
			}
		})
	}
}
