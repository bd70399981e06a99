// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/flow"
)

// TestTextsSurvive: any allowed text of a check survives a round trip, even if YAML would interpret it.
func TestTextsSurvive(t *testing.T) {
	odd := []string{"null", "~", "true", "no", "1e3", "0x10", "010", "-", "- a", "a: b", "a #b", "{", "[x]", "&a", "*a", "!t", "%", "@", "`", "'", `"`, `\`,
		" lead", "trail ", "two\nlines", "\r\n", "\t", "\x00", "\x7f", "\u0085", "\u2028", "\ufeff", "ü", "🙂", "2001:db8::1", "<<", "=", "?", "? x", "---", "..."}
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.SampledFrom(odd), rapid.String()).Draw(t, "text")
		c := &config.Config{Services: []config.Service{{
			Name: "web", Protocol: 6, Mode: config.ModeDNAT,
			Listen:   []config.Listen{{Address: netip.MustParseAddr("2001:db8::10"), Ports: []flow.Ports{{First: 80, Last: 80}}}},
			Backends: []config.Backend{{Address: netip.MustParseAddr("2001:db8::1"), Port: 80}},
			Check:    &config.Check{Type: config.CheckTCP, Send: text, Expect: text},
		}}}
		c.SetDefaults()
		data, err := config.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := config.Decode("text", data)
		if err != nil {
			t.Fatalf("%v\n%s", err, data)
		}
		if got := again.Services[0].Check.Send; got != text {
			t.Fatalf("wrote %q, read %q\n%s", text, got, data)
		}
	})
}
