// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/table"
)

// app is what every subcommand shares: the streams and the global flags.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer // escape text that would control a terminal
	terminal       io.Writer // standard output as it is, for screens that escape their cells

	json     bool
	color    string
	socket   string
	stateDir string
	remote   api.Remote // of commands that may ask a daemon elsewhere
}

func newApp(stdin io.Reader, stdout, stderr io.Writer) *app {
	a := &app{stdin: stdin, terminal: stdout}
	escaped := func(w io.Writer) io.Writer {
		return &table.Output{To: w, Colored: func() bool { return a.colored(w) }}
	}
	a.stdout, a.stderr = escaped(stdout), escaped(stderr)
	return a
}

// exitError ends the program with a code; a nil err prints nothing.
type exitError struct {
	code int
	err  error
}

func (e exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e exitError) Unwrap() error { return e.err }

// usageError is a mistake on the command line. Where it ends in a list of lines, the
// manual is named on a line of its own.
func usageError(cmd *cobra.Command, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	separator := "; "
	if strings.Contains(err.Error(), "\n") {
		separator = "\n"
	}
	return exitError{exitUsage, fmt.Errorf("%w%ssee '%s --help'", err, separator, cmd.CommandPath())}
}

// complain prints an error the way the user asked for.
func (a *app) complain(err error) {
	var errs config.Errors
	isConfig := errors.As(err, &errs)
	switch {
	case a.json && isConfig:
		a.writeJSON(a.stderr, map[string]any{"error": err.Error(), "errors": errs})
		return
	case a.json:
		a.writeJSON(a.stderr, map[string]string{"error": err.Error()})
		return
	case isConfig:
		errs.Render(a.stderr, a.colored(a.stderr))
		return
	}
	fmt.Fprintf(a.stderr, "%s %v\n", a.paint(a.stderr, red, "sluice:"), err)
}

// print writes v as JSON with --json, and calls text otherwise.
func (a *app) print(v any, text func(w io.Writer) error) error {
	if a.json {
		return a.writeJSON(a.stdout, v)
	}
	return text(a.stdout)
}

func (a *app) writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// progress prints a line about long work to standard error, not with --json.
func (a *app) progress(format string, args ...any) {
	if !a.json {
		fmt.Fprintf(a.stderr, format+"\n", args...)
	}
}

// Colours of the terminal's own palette (ECMA-48 SGR).
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	bold   = "1"
	dim    = "2"
)

// paint colours s when w is a terminal and the user did not say otherwise.
func (a *app) paint(w io.Writer, sgr, s string) string {
	if !a.colored(w) {
		return s
	}
	return "\x1b[" + sgr + "m" + s + "\x1b[0m"
}

func (a *app) colored(w io.Writer) bool {
	switch a.color {
	case "always":
		return true
	case "never":
		return false
	}
	f, ok := table.File(w)
	return ok && os.Getenv("NO_COLOR") == "" && term.IsTerminal(int(f.Fd()))
}

// directory returns the state directory: the flag's, or one per network
// namespace, so that several gateways can live on one machine.
func (a *app) directory() string {
	if a.stateDir != "" {
		return a.stateDir
	}
	return usualDirectory()
}

// storeDirectory returns where changes made at run time are kept: what is to survive a restart of the
// machine, but for gateways in network namespaces, which do not.
func (a *app) storeDirectory() string {
	if a.stateDir == "" && usualDirectory() == stateBase {
		return "/var/lib/sluice"
	}
	return filepath.Join(a.directory(), "changes")
}

// stateBase is the state directory of the host's own network namespace.
const stateBase = "/run/sluice"

// usualDirectory returns the state directory of the network namespace where nobody
// names another.
func usualDirectory() string {
	const base = stateBase
	if name, ok := namespaceName(); ok {
		return filepath.Join(base, "netns", name)
	}
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return base
	}
	host, err := os.Stat("/proc/1/ns/net")
	if err != nil || os.SameFile(own, host) {
		return base // the host's namespace, or process 1 may not be looked at
	}
	inode := own.Sys().(*syscall.Stat_t).Ino
	return filepath.Join(base, "netns", fmt.Sprint(inode))
}

// namespaceName returns the name that the own namespace has under /run/netns.
func namespaceName() (string, bool) {
	self, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return "", false
	}
	entries, _ := os.ReadDir("/run/netns") // absent while no namespace has a name
	for _, e := range entries {
		if other, err := os.Stat(filepath.Join("/run/netns", e.Name())); err == nil && os.SameFile(self, other) {
			return e.Name(), true
		}
	}
	return "", false
}

// socketPath returns where the daemon listens.
func (a *app) socketPath() string {
	if a.socket != "" {
		return a.socket
	}
	return filepath.Join(a.directory(), "sluice.sock")
}

// asksRemote gives a command and its subcommands the flags by which they ask a daemon over
// TCP. Such a command gets its client from client.
func asksRemote(a *app, cmd *cobra.Command) *cobra.Command {
	flags := cmd.PersistentFlags()
	flags.Var((*serverFlag)(&a.remote.Server), "server", "ask the daemon at https://HOST:PORT over TCP instead of its socket")
	flags.StringVar(&a.remote.Tokens, "token-file", "", "with --server: file that holds the token")
	flags.StringVar(&a.remote.CA, "ca", "", "with --server: CA that signed the daemon's certificate, PEM (default the system's CAs)")
	flags.StringVar(&a.remote.Cert, "cert", "", "with --server: own certificate, PEM")
	flags.StringVar(&a.remote.Key, "key", "", "with --server: its key, PEM")
	for _, name := range []string{"token-file", "ca", "cert", "key"} {
		_ = cmd.MarkPersistentFlagFilename(name)
	}
	return cmd
}

// serverFlag is --server. An empty value, as of a shell's variable that is not set, is no
// daemon's either: the one at the socket is another.
type serverFlag string

// Set implements pflag.Value.
func (f *serverFlag) Set(s string) error {
	_, err := api.ServerURL(s)
	*f = serverFlag(s)
	return err
}

// String implements pflag.Value.
func (f *serverFlag) String() string { return string(*f) }

// Type implements pflag.Value.
func (f *serverFlag) Type() string { return "string" }

// client returns one for the daemon that the flags name: at its socket, or elsewhere.
func (a *app) client() (*api.Client, error) {
	switch {
	case a.remote.Server != "" && (a.socket != "" || a.stateDir != ""):
		return nil, exitError{exitUsage, errors.New("--server asks over TCP: --socket and --state-dir are of the daemon's own host")}
	case (a.remote.Cert == "") != (a.remote.Key == ""):
		return nil, exitError{exitUsage, errors.New("--cert FILE and --key FILE belong together: name both")}
	case a.remote.Server != "":
		return api.NewRemote(a.remote)
	case a.remote != (api.Remote{}):
		return nil, exitError{exitUsage, errors.New("--token-file, --ca, --cert and --key go with --server https://HOST:PORT")}
	}
	return api.NewClient(a.socketPath()), nil
}

// errNoRoot is returned by commands that change the kernel's state.
var errNoRoot = errors.New("root is needed: run it with sudo, or give the binary CAP_NET_ADMIN, CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN")

// version is the module's version, or the commit of a build from a checkout.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		return v
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value[:min(12, len(s.Value))]
		}
	}
	return "devel"
}
