// SPDX-License-Identifier: Apache-2.0

package tune

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Command is a command of a remedy in the journal, with the commands that undo it.
type Command struct {
	Run string `json:"run"`
	// Undo is in the order in which the commands run.
	Undo []string `json:"undo"`
	Done bool     `json:"done"` // It ran without an error.
}

// errNoUndo is the reason why a command is not tried.
var errNoUndo = errors.New("this command cannot be taken back: run it yourself")

// action is a command that can be undone.
type action struct {
	text  string
	words []string
	set   []Setting // of sysctl; the other fields are empty then
	undo  []string
	// chains are the nftables chains that exist before an nft command.
	chains map[string]bool
}

// iptables matches the programs that add rules by -A and delete them by -D.
var iptables = regexp.MustCompile(`^ip6?tables(-legacy|-nft)?$`)

// program is the path of this program.
func (s *System) program() string {
	if s.Program != "" {
		return s.Program
	}
	path, err := os.Executable()
	if err != nil {
		return "sluice"
	}
	return path
}

// words splits a command at spaces outside quotes. Commands with other syntax of the shell have no words.
func words(command string) (list []string, err error) {
	var word strings.Builder
	quote, inside := rune(0), false
	for _, r := range command {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, inside = r, true
		case r == ' ':
			if inside {
				list = append(list, word.String())
			}
			word.Reset()
			inside = false
		case strings.ContainsRune("|&;<>$`()\\\n", r):
			return nil, errNoUndo
		default:
			word.WriteRune(r)
			inside = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("%s: a quote is not closed", command)
	}
	if inside {
		list = append(list, word.String())
	}
	return list, nil
}

// quoted is the inverse of words.
func quoted(list ...string) string {
	out := make([]string, len(list))
	for i, w := range list {
		if out[i] = w; w == "" || strings.ContainsAny(w, " '\"|&;<>$`()\\") {
			out[i] = "'" + w + "'"
		}
	}
	return strings.Join(out, " ")
}

// output runs a program in the namespace. The error has its messages.
func (s *System) output(ctx context.Context, argv ...string) (text string, err error) {
	err = s.Namespace.Do(func() error {
		cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
		var messages strings.Builder
		cmd.Stderr = &messages
		out, err := cmd.Output()
		text = string(out)
		if err != nil {
			return fmt.Errorf("%s: %w: %s", quoted(argv...), err, strings.TrimSpace(messages.String()))
		}
		return nil
	})
	return text, err
}

// plan finds out how a command is undone. It changes nothing.
func (s *System) plan(ctx context.Context, command string) (a action, err error) {
	if a.words, err = words(command); err != nil {
		return a, err
	}
	a.text = command
	switch w := a.words; {
	case len(w) > 2 && w[0] == "sysctl" && w[1] == "-w":
		for _, text := range w[2:] {
			key, value, ok := strings.Cut(text, "=")
			if !ok {
				return a, errNoUndo
			}
			a.set = append(a.set, Setting{Key: key, Value: value})
		}
	case len(w) > 1 && w[0] == "nft" && !strings.HasPrefix(w[1], "-"):
		a.chains, err = s.nftChains(ctx)
	case len(w) > 3 && w[0] == "ip":
		a.undo, err = s.undoIP(ctx, w)
	case len(w) > 3 && iptables.MatchString(w[0]) && slices.Contains(w, "-A"):
		undo := slices.Clone(w)
		undo[slices.Index(w, "-A")] = "-D"
		a.undo = []string{quoted(undo...)}
	case strings.HasPrefix(command, "sluice conns delete ") && strings.Contains(command, " --state UNREPLIED "):
		// Nothing is lost with entries without an answer: the next packet makes new ones.
		a.words[0] = s.program()
	default:
		err = errNoUndo
	}
	return a, err
}

// undoIP returns the commands that undo a command of the ip program.
func (s *System) undoIP(ctx context.Context, w []string) ([]string, error) {
	ip, w := w[:1:1], w[1:]
	if w[0] == "-4" || w[0] == "-6" {
		ip, w = append(ip, w[0]), w[1:]
	}
	if len(w) < 3 {
		return nil, errNoUndo
	}
	switch object, verb, rest := w[0], w[1], w[2:]; {
	case slices.Contains([]string{"route", "rule", "addr", "neigh"}, object) && verb == "add":
		return []string{quoted(slices.Concat(ip, []string{object, "del"}, rest)...)}, nil
	case object == "route" && verb == "del":
		return s.undoRouteDel(ctx, ip, rest)
	case object == "rule" && verb == "del" && len(rest) == 2 && rest[0] == "priority":
		text, err := s.output(ctx, slices.Concat(ip, []string{"rule", "show", "priority", rest[1]})...)
		_, rule, ok := strings.Cut(strings.TrimSpace(text), ":")
		if err != nil || !ok || strings.ContainsAny(rule, "\n[") {
			return nil, errors.Join(errNoUndo, err)
		}
		return []string{quoted(slices.Concat(ip, []string{"rule", "add", "priority", rest[1]}, strings.Fields(rule))...)}, nil
	case object == "link" && verb == "set":
		return s.undoLink(ctx, rest)
	}
	return nil, errNoUndo
}

// undoRouteDel finds the route that a command deletes: of one kind, or one next hop of a multipath route.
func (s *System) undoRouteDel(ctx context.Context, ip, spec []string) ([]string, error) {
	kind, prefix := "", spec[0]
	if slices.Contains([]string{"unreachable", "blackhole", "prohibit", "throw"}, prefix) && len(spec) > 1 {
		kind, prefix = spec[0], spec[1]
	}
	table := "main"
	if i := slices.Index(spec, "table"); i >= 0 && i+1 < len(spec) {
		table = spec[i+1]
	}
	text, err := s.output(ctx, slices.Concat(ip, []string{"-o", "route", "show", "table", table, "exact", prefix})...)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(text) {
		first, hops, multipath := strings.Cut(strings.TrimSpace(line), `\`)
		f := strings.Fields(first)
		if len(f) == 0 || strings.Contains(hops, `\`) && kind != "" || kind != "" && f[0] != kind {
			continue
		}
		if !multipath {
			f = slices.DeleteFunc(f, func(w string) bool { return w == "linkdown" || w == "dead" || w == "onlink" })
			return []string{quoted(slices.Concat(ip, []string{"route", "append"}, f, []string{"table", table})...)}, nil
		}
		via := slices.Index(spec, "via")
		if ip[len(ip)-1] != "-6" || via < 0 || !strings.Contains(hops, "via "+spec[via+1]+" ") {
			continue // IPv4 replaces a multipath route only as a whole
		}
		if m := slices.Index(f, "metric"); m >= 0 && m+1 < len(f) {
			spec = slices.Concat(spec, f[m:m+2])
		}
		return []string{quoted(slices.Concat(ip, []string{"route", "append"}, spec)...)}, nil
	}
	return nil, errNoUndo
}

// portStates are the numbers of the states of a bridge's port (linux/if_bridge.h).
var portStates = []string{"disabled", "listening", "learning", "forwarding", "blocking"}

// undoLink reads the attribute that a command sets.
func (s *System) undoLink(ctx context.Context, w []string) ([]string, error) {
	if w[0] == "dev" {
		w = w[1:]
	}
	if len(w) < 3 {
		return nil, errNoUndo
	}
	text, err := s.output(ctx, "ip", "-d", "-j", "link", "show", "dev", w[0])
	if err != nil {
		return nil, err
	}
	var links []struct {
		MTU   int `json:"mtu"`
		Queue int `json:"txqlen"`
		Info  struct {
			Data struct {
				STP *int `json:"stp_state"`
			} `json:"info_data"`
			Port struct {
				State string `json:"state"`
			} `json:"info_slave_data"`
		} `json:"linkinfo"`
	}
	if err := json.Unmarshal([]byte(text), &links); err != nil || len(links) != 1 {
		return nil, errors.Join(errNoUndo, err)
	}
	l, set := links[0], "ip link set dev "+quoted(w[0])
	switch what := w[1:]; {
	case len(what) == 2 && what[0] == "mtu":
		return []string{fmt.Sprintf("%s mtu %d", set, l.MTU)}, nil
	case len(what) == 2 && what[0] == "txqueuelen":
		return []string{fmt.Sprintf("%s txqueuelen %d", set, l.Queue)}, nil
	case len(what) == 4 && what[0] == "type" && what[1] == "bridge" && what[2] == "stp_state" && l.Info.Data.STP != nil:
		return []string{fmt.Sprintf("%s type bridge stp_state %d", set, *l.Info.Data.STP)}, nil
	case len(what) == 4 && what[0] == "type" && what[1] == "bridge_slave" && what[2] == "state":
		if n := slices.Index(portStates, l.Info.Port.State); n >= 0 {
			return []string{fmt.Sprintf("%s type bridge_slave state %d", set, n)}, nil
		}
	}
	return nil, errNoUndo
}

// nftChains returns the names of all chains: nft echoes a chain that exists as if it were new.
func (s *System) nftChains(ctx context.Context) (map[string]bool, error) {
	text, err := s.output(ctx, "nft", "-j", "list", "chains")
	if err != nil {
		return nil, err
	}
	var list struct {
		Objects []struct {
			Chain *struct{ Family, Table, Name string } `json:"chain"`
		} `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return nil, fmt.Errorf("nft -j list chains: %w", err)
	}
	chains := map[string]bool{}
	for _, o := range list.Objects {
		if c := o.Chain; c != nil {
			chains[c.Family+" "+c.Table+" "+c.Name] = true
		}
	}
	return chains, nil
}

// nftAdded matches an object in the output of nft --echo --handle.
var nftAdded = regexp.MustCompile(`(?m)^(?:add|insert) (table|chain|rule) (\S+ \S+)(?: (\S+))?.*# handle (\d+)`)

// nftUndo returns the commands that delete the objects of the output of nft --echo --handle, last one first. Objects
// of a new table end with the table.
func nftUndo(echo string, chains map[string]bool) (undo []string) {
	gone := map[string]bool{} // tables and chains that are deleted as a whole
	for _, m := range nftAdded.FindAllStringSubmatch(echo, -1) {
		kind, table, chain, handle := m[1], m[2], m[2]+" "+m[3], m[4]
		switch {
		case kind == "table":
			gone[table] = true
			undo = append(undo, "nft delete table "+table)
		case gone[table]:
		case kind == "chain" && !chains[chain]:
			undo = append(undo, "nft delete chain "+chain)
		case kind == "rule":
			undo = append(undo, "nft delete rule "+chain+" handle "+handle)
		}
	}
	slices.Reverse(undo)
	return undo
}

// steps turns a setting into journal steps. A forwarding setting changes others: they are steps without a wanted
// value, so that they are restored after it.
func (s *System) steps(set Setting) (list []Step, err error) {
	for _, key := range append(s.dependent(set.Key), set.Key) {
		before, err := s.Get(key)
		if err != nil {
			return nil, err
		}
		list = append(list, Step{Key: key, Before: before})
	}
	list[len(list)-1].Wanted = set.Value
	return list, nil
}

// dependent returns the keys that the kernel changes together with a forwarding setting (inet_forward_change,
// addrconf_fixup_forwarding).
func (s *System) dependent(key string) (keys []string) {
	family, single := "", ""
	switch {
	case key == "net.ipv4.ip_forward":
		family = "ipv4"
	case strings.HasPrefix(key, "net.ipv4.conf.") && strings.HasSuffix(key, ".forwarding"):
		family = "ipv4"
	case strings.HasPrefix(key, "net.ipv6.conf.") && strings.HasSuffix(key, ".forwarding"):
		family = "ipv6"
	default:
		return nil
	}
	if rest, ok := strings.CutPrefix(key, "net."+family+".conf."); ok {
		if single = strings.TrimSuffix(rest, ".forwarding"); single == "all" {
			single = ""
		}
	}
	var names []string
	_ = s.Namespace.Do(func() error {
		dirs, err := os.ReadDir(filepath.Join(s.proc(), "net", family, "conf"))
		for _, d := range dirs {
			names = append(names, strings.ReplaceAll(d.Name(), ".", "/"))
		}
		return err
	})
	for _, name := range names {
		for _, setting := range []string{"forwarding", "accept_redirects"} {
			k := "net." + family + ".conf." + name + "." + setting
			if k != key && (single == "" || single == name) && s.writable(k) == nil {
				keys = append(keys, k)
			}
		}
	}
	return keys
}
