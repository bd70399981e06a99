// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"syscall"
)

// minToken is the minimum length of a token in bytes: 96 random bits in base64, too many to guess
// over a network.
const minToken = 16

// maxSecret is the maximum size of a credentials file in bytes.
const maxSecret = 1 << 20

// token matches a bearer token (RFC 6750 §2.1, b64token).
var token = regexp.MustCompile(`^[A-Za-z0-9._~+/-]+=*$`)

// RoleMetrics is the role of a token that may read the metrics page alone.
const RoleMetrics = "metrics"

// Token is an entry of a token file. The name is only for the log. A token without a role may use
// the whole API.
type Token struct{ Name, Role, Secret string }

// String returns the token in the form of the file.
func (t Token) String() string {
	switch {
	case t.Role != "":
		return t.Name + ":" + t.Role + ":" + t.Secret
	case t.Name != "":
		return t.Name + ":" + t.Secret
	}
	return t.Secret
}

// ParseTokens splits the content of a file of tokens: separated by white space, each as TOKEN, NAME:TOKEN or
// NAME:ROLE:TOKEN.
func ParseTokens(text string) (tokens []Token) {
	for word := range strings.FieldsSeq(text) {
		t := Token{Secret: word}
		if name, rest, named := strings.Cut(word, ":"); named {
			t.Name, t.Secret = name, rest
		}
		if role, secret, limited := strings.Cut(t.Secret, ":"); limited {
			t.Role, t.Secret = role, secret
		}
		tokens = append(tokens, t)
	}
	return tokens
}

// ReadTokens reads a file of tokens for "Authorization: Bearer". Like ssh with keys, it refuses a
// file that users other than its owner can read. It requires at least one token, and 16 bytes in
// each.
func ReadTokens(file string) ([]Token, error) {
	raw, err := ReadSecret(file, 0o077)
	if err != nil {
		return nil, fmt.Errorf("token file %w", err)
	}
	tokens := ParseTokens(string(raw))
	if len(tokens) == 0 {
		return nil, fmt.Errorf("token file %s: it is empty: write a token of %d bytes or more into it, as 'openssl rand -hex 32' makes them", file, minToken)
	}
	for i, t := range tokens {
		if t.Role != "" && t.Role != RoleMetrics {
			return nil, fmt.Errorf("token file %s: token %d has the role %q: the only role is %s; a token without a role may use the whole API", file, i+1, t.Role, RoleMetrics)
		}
		if len(t.Secret) < minToken {
			return nil, fmt.Errorf("token file %s: token %d has %d bytes, at least %d keep it from being guessed: 'openssl rand -hex 32' makes one", file, i+1, len(t.Secret), minToken)
		}
		if !token.MatchString(t.Secret) {
			return nil, fmt.Errorf("token file %s: token %d has characters that no header carries: use letters, digits and -._~+/", file, i+1)
		}
	}
	return tokens, nil
}

// ReadSecret reads a regular file that grants none of the permissions in forbidden. It must
// not be larger than 1 MiB.
func ReadSecret(file string, forbidden fs.FileMode) ([]byte, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NONBLOCK, 0) // does not block on a pipe without a writer
	if err != nil {
		return nil, withoutPath(file, err)
	}
	defer f.Close()
	switch info, err := f.Stat(); {
	case err != nil:
		return nil, withoutPath(file, err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s: it is no regular file, which could be read again when it changes", file)
	case info.Mode().Perm()&forbidden != 0:
		return nil, fmt.Errorf("%s: its mode %04o lets others than its owner use it: chmod %04o %s", file, info.Mode().Perm(), info.Mode().Perm()&^forbidden, file)
	}
	raw, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return nil, withoutPath(file, err)
	}
	if len(raw) > maxSecret {
		return nil, fmt.Errorf("%s: it is larger than %d bytes", file, maxSecret)
	}
	return raw, nil
}

// withoutPath removes the path that the error already contains.
func withoutPath(file string, err error) error {
	if path, ok := err.(*fs.PathError); ok {
		err = path.Err
	}
	return fmt.Errorf("%s: %w", file, err)
}
