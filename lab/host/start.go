// SPDX-License-Identifier: Apache-2.0

package host

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/sluice-lb/sluice/lab"
)

// notStarted separates the absent servers in the line of "lab serve".
const notStarted = "; not started: "

// ServesLine reports the servers of a node in one line. absent are the servers that did not start, each with its reason.
func ServesLine(node string, running []lab.ServerSpec, absent []string) string {
	line := node + " serves " + cmp.Or(joinServers(running), "nothing")
	if len(absent) > 0 {
		line += notStarted + strings.Join(absent, ", ")
	}
	return line
}

// Start starts the servers of every node as processes that outlive this one, and returns when they listen. Each process
// runs "lab serve" of this program, which prints ServesLine. absent contains the servers that were not started, with the
// reason, by node.
func Start(ctx context.Context, l *lab.Lab) (absent map[string][]string, err error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	absent = map[string][]string{}
	for _, n := range l.Nodes() {
		if len(n.Spec().Servers) == 0 {
			continue
		}
		cmd := n.Command(context.WithoutCancel(ctx), self, "lab", "serve", l.ID(), n.Short())
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C at the terminal is not for them
		var stderr strings.Builder
		read, write, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		cmd.Stdout, cmd.Stderr = write, write
		err = cmd.Start()
		write.Close()
		if err != nil {
			read.Close()
			return nil, err
		}
		line, err := bufio.NewReader(io.TeeReader(read, &stderr)).ReadString('\n')
		read.Close()
		if err != nil || !strings.HasPrefix(line, n.Short()+" serves ") {
			return nil, errors.Join(fmt.Errorf("node %s: its servers did not start: %s", n.Short(), strings.TrimSpace(stderr.String())), cmd.Wait())
		}
		if _, missing, ok := strings.Cut(strings.TrimSpace(line), notStarted); ok {
			absent[n.Short()] = strings.Split(missing, ", ")
		}
	}
	return absent, nil
}

func joinServers(servers []lab.ServerSpec) string {
	var words []string
	for _, s := range servers {
		words = append(words, s.String())
	}
	return strings.Join(words, ", ")
}
