// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
)

// device matches the interfaces of chains of family netdev and of flowtables.
var device = regexp.MustCompile(`\bdevices?\s*=?\s*(\{[^}]*\}|"[^"]+"|[\w.@-]+)`)

// JSON converts rules in the text form of nft to the output of "nft -j list ruleset". The program
// nft loads them in a temporary network namespace; without root also in a user namespace.
func JSON(text string) (string, error) {
	script := "set -e\n"
	seen := map[string]bool{}
	for _, m := range device.FindAllStringSubmatch(text, -1) {
		for _, name := range strings.FieldsFunc(m[1], func(r rune) bool { return strings.ContainsRune("{}\", \t\n", r) }) {
			if !seen[name] && regexp.MustCompile(`^[\w.@-]{1,15}$`).MatchString(name) && name != "lo" && name != "priority" {
				seen[name] = true
				script += "ip link add " + name + " type dummy\n"
			}
		}
	}
	cmd := exec.Command("sh", "-c", script+"nft -f -\nexec nft -j list ruleset")
	cmd.Stdin = strings.NewReader(text)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("nft does not load the rules in a namespace: %w: %s; pass the output of 'nft -j list ruleset' prints on the gateway", err, strings.TrimSpace(stderr.String()))
	}
	return out.String(), nil
}
