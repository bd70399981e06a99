// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
)

// A sealed JSON object has its checksum as the last member: the SHA-256 of the object without this
// member. A program that does not know the member can still read the object.
const (
	sealBegin = `,"checksum":"`
	sealEnd   = `"}`
	sealSize  = len(sealBegin) + 2*sha256.Size + len(sealEnd)
)

// ErrDamaged is returned if an object and its checksum do not match.
var ErrDamaged = errors.New("the file is damaged: its checksum does not match its content")

// Seal returns a JSON object that is not empty, as [encoding/json.Marshal] writes it, with its checksum.
func Seal(object []byte) []byte {
	return fmt.Appendf(slices.Clone(object[:len(object)-1]), "%s%s%s\n", sealBegin, checksum(object), sealEnd)
}

// Unseal returns the object without its checksum, or [ErrDamaged]. It returns an object that has no
// checksum as it is.
func Unseal(text []byte) (object []byte, sealed bool, err error) {
	text = bytes.TrimSpace(text)
	at := len(text) - sealSize
	if at <= 0 || !bytes.HasPrefix(text[at:], []byte(sealBegin)) {
		return text, false, nil
	}
	object = append(slices.Clone(text[:at]), '}')
	if !bytes.Equal(text[at:], fmt.Appendf(nil, "%s%s%s", sealBegin, checksum(object), sealEnd)) {
		return nil, true, ErrDamaged
	}
	return object, true, nil
}

func checksum(object []byte) string {
	sum := sha256.Sum256(object)
	return hex.EncodeToString(sum[:])
}
