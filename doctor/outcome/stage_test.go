// SPDX-License-Identifier: Apache-2.0

package outcome

import "testing"

func TestStageTextRoundTrip(t *testing.T) {
	for s := StageUnknown; s <= Answered; s++ {
		text, err := s.MarshalText()
		if err != nil {
			t.Fatal(err)
		}
		var back Stage
		if err := back.UnmarshalText(text); err != nil || back != s {
			t.Errorf("stage %d: text %q reads as %d (%v)", s, text, back, err)
		}
	}
	if new(Stage).UnmarshalText([]byte("elsewhere")) == nil {
		t.Error("an unknown stage was accepted")
	}
}
