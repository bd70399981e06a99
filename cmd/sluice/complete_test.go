// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-lb/sluice/lab/labtest"
)

// completions are command lines up to the TAB key, with offered words; a word after ! must not be offered.
var completions = map[string]string{
	"sluice ":                            "apply bench conns tune",
	"sluice ap":                          "apply !bench",
	"sluice show ":                       "services backends flows",
	"sluice show services ":              "!notes.txt !gateway.yaml",
	"sluice backend ":                    "web dns !notes.txt",
	"sluice backend web ":                "a b !c",
	"sluice backend web a ":              "up drain down auto",
	"sluice node ":                       "drain auto !notes.txt",
	"sluice show flows --da":             "--datapath",
	"sluice show flows --datapath ":      "nftables ebpf kernel",
	"sluice show flows --protocol ":      "tcp udp icmpv6",
	"sluice show flows --owner ":         "web dns office",
	"sluice show flows --backend ":       "a b c",
	"sluice conns --by ":                 "source service snat-port",
	"sluice conns --state ":              "TIME_WAIT UNREPLIED",
	"sluice conns --netns ":              "all",
	"sluice --color ":                    "auto always never",
	"sluice bench ":                      "packets flows docs",
	"sluice tune ":                       "router balancer rollback",
	"sluice plan --output ":              "table sysctl sluice",
	"sluice lab up ":                     "balancer office",
	"sluice load packets --protocol ":    "udp tcp icmp",
	"sluice load packets --from ":        "lo",
	"sluice explain ":                    "tcp udp !notes.txt",
	"sluice explain tcp 1:2 3:4 --in ":   "lo",
	"sluice apply ":                      "gateway.yaml",
	"sluice run --config ":               "gateway.yaml",
	"sluice import ":                     "iptables !notes.txt",
	"sluice completion ":                 "bash zsh fish",
	"sluice doctor --netns all --second": "--seconds",
}

// TestShellsComplete runs completion in the shells themselves, with the scripts of 'sluice completion' and a
// running daemon.
func TestShellsComplete(t *testing.T) {
	dir := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	state, files := filepath.Join(dir, "state"), filepath.Join(dir, "files")
	for _, err := range []error{
		os.Mkdir(state, 0o755), os.Mkdir(files, 0o755),
		os.Symlink(self, filepath.Join(dir, "sluice")), // runs sluice under this name, see TestMain
		os.WriteFile(filepath.Join(files, "gateway.yaml"), nil, 0o644),
		os.WriteFile(filepath.Join(files, "notes.txt"), nil, 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	socket, err := net.Listen("unix", filepath.Join(state, "sluice.sock"))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(map[string]string{
			"backends": `[{"service":"web","name":"a","address":"10.0.2.2:80"},{"service":"web","name":"b","address":"10.0.2.3:80"},{"service":"dns","name":"c","address":"10.0.2.4:53"}]`,
			"services": `[{"name":"web"},{"name":"dns"}]`,
			"nat":      `[{"name":"office"}]`,
		}[filepath.Base(r.URL.Path)]))
	})}
	go srv.Serve(socket)
	defer srv.Close()

	for shell, ask := range map[string]string{
		"bash": `. /usr/share/bash-completion/bash_completion
eval "$(sluice completion bash)"
while IFS= read -r line; do
	echo "== $line"
	COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=63 COMP_KEY=9 COMPREPLY=()
	read -ra COMP_WORDS <<<"$line"
	[[ $line != *' ' ]] || COMP_WORDS+=("")
	COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
	__start_sluice sluice "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
	printf '%s\n' "${COMPREPLY[@]}"
done`,
		"fish": `sluice completion fish | source
while read -l line
	echo "== $line"
	complete --do-complete="$line"
end`,
		"zsh": zshAsks,
	} {
		t.Run(shell, func(t *testing.T) {
			labtest.Require(t, labtest.Tool(shell))
			flags := map[string][]string{"bash": {"--norc"}, "fish": {"--no-config"}, "zsh": {"-f"}}[shell]
			cmd := exec.Command(shell, append(flags, "-c", ask)...)
			cmd.Dir = files
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOME="+dir, "TERM=dumb")
			var lines []string
			for line := range completions {
				lines = append(lines, strings.Replace(line, "sluice ", "sluice --state-dir "+state+" ", 1))
			}
			slices.Sort(lines)
			cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			offered := map[string][]string{}
			line := ""
			for l := range strings.Lines(string(out)) {
				if begin, ok := strings.CutPrefix(strings.TrimRight(l, "\n"), "== "); ok {
					line = strings.Replace(begin, "sluice --state-dir "+state+" ", "sluice ", 1)
				} else if word := strings.Fields(l); len(word) > 0 {
					offered[line] = append(offered[line], word[0])
				}
			}
			for line, want := range completions {
				for _, word := range strings.Fields(want) {
					word, not := strings.CutPrefix(word, "!")
					if slices.Contains(offered[line], word) == not {
						t.Errorf("%sTAB: %s offered: %v, in %s", line, word, !not, fmt.Sprint(offered[line]))
					}
				}
			}
		})
	}
}

// zshAsks types the lines into an interactive shell, where one key completes and records all matches.
const zshAsks = `zmodload zsh/zpty
sluice completion zsh >$HOME/_sluice
cat >$HOME/begin <<'EOF'
fpath=($HOME $fpath)
autoload -Uz compinit && compinit -u -D
setopt no_auto_list no_auto_menu no_beep
compadd() {
	local -a found
	builtin compadd -O found "$@"
	print -rl -- $found >>$HOME/matches
	builtin compadd "$@"
}
ask() {
	zle complete-word
	BUFFER=
	: >$HOME/asked
}
zle -N ask && bindkey '^T' ask
: >$HOME/asked
EOF
asked() {
	for wait in {1..3000}; do
		[[ -e $HOME/asked ]] && rm $HOME/asked && return
		sleep 0.01
	done
	exit 1
}
zpty -b z zsh -f -i
zpty -w z 'source $HOME/begin'
asked
while IFS= read -r line; do
	print -r -- "== $line" >>$HOME/matches
	zpty -w -n z "$line"$'\x14'
	asked
done
zpty -d z
cat $HOME/matches`
