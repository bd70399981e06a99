// SPDX-License-Identifier: Apache-2.0

package nfnl

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestExplain uses the kernel's errors: EINVAL is the error of nfnetlink without nf_tables, EPROTONOSUPPORT of a
// kernel without nfnetlink.
func TestExplain(t *testing.T) {
	for errno, want := range map[unix.Errno]string{
		unix.EPERM:           "run as root or with CAP_NET_ADMIN",
		unix.EINVAL:          `load it with "modprobe nf_tables"`,
		unix.EPROTONOSUPPORT: `load it with "modprobe nf_tables"`,
		unix.ENOMEM:          "cannot allocate memory",
	} {
		err := Explain(fmt.Errorf("dump: %w", errno))
		if !errors.Is(err, errno) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v becomes %q, want %q in it", errno, err, want)
		}
	}
}
