// SPDX-License-Identifier: Apache-2.0

// Package outcome finds out what became of connections and datagram exchanges, from packets seen
// at the interfaces of a host and from its connection table. It reads nothing itself.
package outcome

import (
	"fmt"
	"slices"
)

// Stage is the last step of an exchange through this host for which there is evidence.
type Stage uint8

// The stages, in the order in which packets pass them.
const (
	StageUnknown  Stage = iota
	NeverLeft           // The request arrived and did not leave: dropped, or no route, or no next hop.
	WrongWay            // The request left by the interface of its arrival, or by one from which the server is unreachable.
	Untranslated        // The request left without the translation that a rule should have made.
	NoAnswer            // The request left; no interface received an answer.
	AnswerLost          // An answer arrived and did not leave to the client.
	Refused             // The server answered by a reset or an ICMP error.
	ClientRejects       // The answer left to the client; the client repeats or resets.
	TooBig              // Small packets are answered, large ones are not.
	Unread              // The client or the server keeps its receive window at 0: its program does not read.
	Answered
)

var stageNames = [...]string{"unknown", "never left", "wrong way", "untranslated", "no answer", "answer lost", "refused", "client rejects", "too big", "unread", "answered"}

// String returns the stage in a few words.
func (s Stage) String() string {
	if int(s) < len(stageNames) {
		return stageNames[s]
	}
	return fmt.Sprint(uint8(s))
}

// MarshalText writes the words.
func (s Stage) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads the words of MarshalText.
func (s *Stage) UnmarshalText(text []byte) error {
	i := slices.Index(stageNames[:], string(text))
	if i < 0 {
		return fmt.Errorf("unknown stage %q", text)
	}
	*s = Stage(i)
	return nil
}
