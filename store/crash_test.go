// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"
)

// crashDir selects the role of the process to be killed, in the test binary.
const crashDir = "SLUICE_STORE_CRASH"

// TestKill kills a process 200 times while it writes one document after the other. The file then has one
// complete document, not older than the last completed write.
func TestKill(t *testing.T) {
	if dir := os.Getenv(crashDir); dir != "" {
		changeForEver(t, dir)
	}
	kills := 200
	if testing.Short() {
		kills = 20
	}
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, 2))
	at := 0
	for n := 0; n < kills || at < kills/4 && n < 10*kills; n++ { // on a busy machine some kills arrive before the first write
		cmd := exec.Command(os.Args[0], "-test.run=^TestKill$")
		cmd.Env = append(os.Environ(), crashDir+"="+dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if !lines.Scan() { // it has begun
			t.Fatalf("the process ended: %s", &stderr)
		}
		time.AfterFunc(time.Duration(random.IntN(8000))*time.Microsecond, func() { _ = cmd.Process.Kill() })
		returned := at
		for lines.Scan() {
			if n, err := strconv.Atoi(lines.Text()); err == nil { // the last line may be cut
				returned = n
			}
		}
		_ = cmd.Wait()
		s := open(t, dir)
		if s.content.Config == nil {
			if returned > 0 {
				t.Fatalf("change %d is lost", returned)
			}
			continue
		}
		backends := s.content.Config.Services[0].Backends
		at = backends[0].Weight + 256*backends[0].MaxConnections
		if backends[1].Weight+256*backends[1].MaxConnections != at || len(s.content.States) != at%2 {
			t.Fatalf("a mix: %+v, states %v", backends, s.content.States)
		}
		if at < returned {
			t.Fatalf("change %d is there, %d had returned", at, returned)
		}
	}
	if at < kills/4 {
		t.Errorf("%d changes in all: the kills came too early to prove anything", at)
	}
}

// changeForEver makes change after change, each with the same number at both backends.
func changeForEver(t *testing.T, dir string) {
	s := open(t, dir)
	file := decode(t, "services:\n"+service("web", 1, 1))
	n := 0
	if s.content.Config != nil {
		b := s.content.Config.Services[0].Backends[0]
		n = b.Weight + 256*b.MaxConnections
	}
	fmt.Println("begins")
	for {
		if n++; n%256 == 0 {
			n++ // no weight
		}
		c := decode(t, "services:\n"+service("web", n%256, n%256))
		for i := range c.Services[0].Backends {
			c.Services[0].Backends[i].MaxConnections = n / 256
		}
		var states []Override
		if n%2 == 1 {
			states = []Override{{Service: "web", Backend: "a", State: "drain"}}
		}
		change(t, s, file, Content{Config: c, States: states}, "change")
		fmt.Println(n)
	}
}
