// SPDX-License-Identifier: Apache-2.0

package announce

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"time"
)

// A BGP speaker listens on this port (RFC 4271 §8.2.1), in the notation of /proc/net/tcp.
const bgpPort = ":00B3"

// speakerInterval is the minimum time between two looks at the sockets of the host.
const speakerInterval = 5 * time.Second

// Warnings returns the damage of the record at the start, and a warning if addresses are announced and no BGP speaker can
// export them.
func (a *Announcer) Warnings() (list []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.lost != "" {
		list = append(list, a.lost)
	}
	announced := false
	for _, s := range a.list {
		announced = announced || s.State == Announced
	}
	if !announced || a.ended {
		return list
	}
	if now := time.Now(); now.Sub(a.looked) >= speakerInterval {
		a.looked, a.speaker = now, hasBGPListener("/proc/thread-self/net/tcp") || hasBGPListener("/proc/thread-self/net/tcp6")
	}
	if a.speaker {
		return list
	}
	return append(list, fmt.Sprintf("addresses are announced in routing table %d, but no BGP speaker listens on TCP port 179 of this host: start BIRD or FRR, and export the table", a.place.Table))
}

// hasBGPListener reports whether a list of sockets has a listener on the port of BGP. The kernel lists all listeners before the
// first connection, so that the number of connections does not matter.
func hasBGPListener(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false // the kernel has no IPv6
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		field := strings.Fields(lines.Text())
		if len(field) < 4 || field[0] == "sl" {
			continue
		}
		if field[3] != "0A" { // not TCP_LISTEN
			return false
		}
		if strings.HasSuffix(field[1], bgpPort) {
			return true
		}
	}
	return false
}
