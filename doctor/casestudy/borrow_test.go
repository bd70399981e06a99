// SPDX-License-Identifier: Apache-2.0

package casestudy

import (
	"errors"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-lb/sluice/doctor/faults"
	"github.com/sluice-lb/sluice/lab/labtest"
)

// TestBorrowWaitsBeforeItLooks: what another program has set for a while is not taken
// for the host's own value.
func TestBorrowWaitsBeforeItLooks(t *testing.T) {
	labtest.Require(t, labtest.Root, labtest.Conntrack)
	if st, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max"); err != nil || st.Mode()&0o200 == 0 {
		labtest.Lacks(t, "nf_conntrack_max can be written only in the host's first network namespace")
	}
	other, err := faults.Borrow(t.Context(), map[string]string{tableMax: ""})
	if err != nil {
		t.Fatal(err)
	}
	limit := func() string {
		v, err := host.Get(tableMax)
		if err != nil {
			t.Error(err)
		}
		return v
	}
	own := limit()
	n, err := strconv.Atoi(own)
	if err == nil {
		err = host.Set(tableMax, strconv.Itoa(n+1))
	}
	if err != nil {
		t.Error(errors.Join(err, other()))
		return
	}
	borrowed := make(chan error, 1)
	go func() {
		restore, err := borrow(t.Context())
		if err == nil {
			if now := limit(); now != own {
				t.Errorf("the case study begins with %s = %s, the host's is %s", tableMax, now, own)
			}
			err = restore()
		}
		borrowed <- err
	}()
	time.Sleep(100 * time.Millisecond) // it has the time to look too early
	if err := errors.Join(other(), <-borrowed); err != nil {
		t.Error(err)
	}
	if now := limit(); now != own {
		t.Errorf("%s is %s afterwards, was %s", tableMax, now, own)
	}
}
