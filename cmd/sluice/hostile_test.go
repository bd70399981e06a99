// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/audit"
	"github.com/sluice-lb/sluice/datapath"
	"github.com/sluice-lb/sluice/event"
	"github.com/sluice-lb/sluice/table"
)

// forged begins a line of every stored text in this test.
const forged = "2026-01-01 00:00:00  revision 9: forged"

// hostile moves the cursor, clears the screen, sets the title, reorders the line and begins a new one.
const hostile = "a\x1b[2J\x1b[1A\u009b31m\x1b]0;title\a\u202e\u2066\r\n" + forged + "\n\x7f\x00\xff\u2028\U000e0001"

// fill sets every text of a value to the hostile one, and every list to two of its elements.
func fill(v reflect.Value, depth int) {
	switch p := v.Addr().Interface().(type) {
	case *time.Time:
		*p = time.Now()
		return
	case *netip.Addr:
		*p = netip.MustParseAddr("192.0.2.1")
		return
	case *netip.AddrPort:
		*p = netip.MustParseAddrPort("192.0.2.1:80")
		return
	case *netip.Prefix:
		*p = netip.MustParsePrefix("192.0.2.0/24")
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(hostile)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Pointer:
		if depth > 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(v.Elem(), depth-1)
		}
	case reflect.Slice:
		if depth > 0 {
			v.Set(reflect.MakeSlice(v.Type(), 2, 2))
			for i := range 2 {
				fill(v.Index(i), depth-1)
			}
		}
	case reflect.Map:
		if depth > 0 && v.Type().Key().Kind() == reflect.String {
			elem := reflect.New(v.Type().Elem()).Elem()
			fill(elem, depth-1)
			v.Set(reflect.MakeMap(v.Type()))
			v.SetMapIndex(reflect.ValueOf(hostile).Convert(v.Type().Key()), elem)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), depth)
			}
		}
	default:
		if v.CanInt() {
			v.SetInt(7)
		} else if v.CanUint() {
			v.SetUint(7)
		} else if v.CanFloat() {
			v.SetFloat(7)
		}
	}
}

func filled[T any]() any {
	v := new(T)
	fill(reflect.ValueOf(v).Elem(), 6)
	return v
}

// hostileDaemon responds to every request of the API with hostile text.
func hostileDaemon(t *testing.T) string {
	t.Helper()
	answers := map[string]any{
		"/status": filled[api.Status](), "/services": filled[[]api.Service](), "/backends": filled[[]api.Backend](), "/nat": filled[[]api.NATRule](),
		"/interfaces": filled[[]api.Interface](), "/addresses": filled[[]api.Address](), "/mappings": filled[[]api.Mapping](), "/flows": filled[api.Flows](),
		"/explain": filled[datapath.Explanation](), "/config/changes": filled[api.ConfigChanges](), "/audit": filled[[]audit.Entry](), "/drain": filled[api.GatewayDrain](), "/node/state": filled[api.NodeState](),
		"/plan": filled[api.Outcome](), "/config": filled[api.Outcome](), "/reload": filled[api.Outcome](), "/config/revert": filled[api.Outcome](),
		"/config/services": filled[[]map[string]string](), "/config/firewall/sets": filled[map[string][]string](), "/changes": filled[api.Outcome](),
	}
	at := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", at)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/api/v1")
		answer, ok := answers[path]
		switch {
		case path == "/events":
			w.Header().Set("Content-Type", "text/event-stream")
			for i := range 3 {
				e := *filled[event.Event]().(*event.Event)
				e.ID, e.Ended = uint64(i+1), i == 1
				_, _ = w.Write(e.Message())
			}
		case ok:
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(answer)
		default:
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(http.StatusConflict)
			_ = json.NewEncoder(w).Encode(map[string]any{"status": 409, "title": hostile, "detail": hostile})
		}
	})}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { s.Close() })
	return at
}

// TestStoredTextControlsNoTerminal: no command prints a character that is not printable, and no value of
// the daemon begins a line. JSON keeps the values.
func TestStoredTextControlsNoTerminal(t *testing.T) {
	at := hostileDaemon(t)
	commands := []string{
		"events", "audit", "config diff", "config history", "config history --edits", "config show --origin", "drain", "explain tcp 192.0.2.1:1 192.0.2.2:2",
		"service list", "nat list", "set list", "backend web a drain", "node drain", "node auto", "config revert --all", "config save", "service rm web", "stop", "conns --list",
	}
	for _, c := range newShow(&app{}).Commands() {
		commands = append(commands, "show "+c.Name())
	}
	if len(commands) < 22 {
		t.Errorf("%d commands", len(commands))
	}
	for _, command := range append(commands, "show") {
		for _, color := range []string{"never", "always"} {
			_, out, stderr := sluiceCommand("", append(strings.Fields(command), "--socket", at, "--color", color)...)
			if out+stderr == "" {
				t.Errorf("sluice %s prints nothing", command)
			}
			for _, seq := range []string{"\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[1m", "\x1b[0m"} {
				if color == "always" {
					out, stderr = strings.ReplaceAll(out, seq, ""), strings.ReplaceAll(stderr, seq, "")
				}
			}
			for line := range strings.Lines(out + stderr) {
				for _, r := range strings.TrimSuffix(line, "\n") {
					if !unicode.IsPrint(r) {
						t.Errorf("sluice %s prints %U: %q", command, r, line)
					}
				}
			}
			for line := range strings.Lines(out) {
				if strings.HasPrefix(strings.TrimSpace(line), forged) {
					t.Errorf("sluice %s prints a forged line: %q", command, line)
				}
			}
		}
		if _, out, _ := sluiceCommand("", append(strings.Fields(command), "--socket", at, "--json")...); strings.ContainsAny(out, "\x1b\u202e\u009b") {
			t.Errorf("sluice %s --json prints them: %q", command, out)
		}
	}
	_, out, _ := sluiceCommand("", "audit", "--socket", at, "--json")
	var entries []audit.Entry
	if err := json.Unmarshal([]byte(out), &entries); err != nil || len(entries) != 2 || entries[0].What != strings.ToValidUTF8(hostile, "\ufffd") {
		t.Errorf("%v, %+v", err, entries)
	}
}

// FuzzOutput: whatever is written, and however it is split, only printable characters, line feeds, tabs and
// colours reach the terminal, and printable text stays as it is.
func FuzzOutput(f *testing.F) {
	f.Add(hostile, 3, true)
	f.Add("größe\x1b[31mred\x1b[0m\x1b[2J", 7, true)
	f.Fuzz(func(t *testing.T, text string, split int, colored bool) {
		var out strings.Builder
		o := &table.Output{To: &out, Colored: func() bool { return colored }}
		split = min(max(split, 0), len(text))
		fmt.Fprint(o, text[:split])
		fmt.Fprint(o, text[split:]+".")
		got := out.String()
		if colored {
			for _, seq := range []string{"\x1b[0m", "\x1b[1m", "\x1b[1;31m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"} {
				got = strings.ReplaceAll(got, seq, "")
			}
		}
		for _, r := range got {
			if !unicode.IsPrint(r) && r != '\n' && r != '\t' {
				t.Errorf("%U in %q", r, got)
			}
		}
		if table.Escape(text) == text && out.String() != text+"." {
			t.Errorf("%q is printed as %q", text, out.String())
		}
	})
}
