// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/daemon"
	"github.com/sluice-lb/sluice/table"
)

// app holds the streams and global flags shared by all subcommands.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer // Control characters are escaped.
	terminal       io.Writer // Unescaped standard output, for screens that escape their cells.

	json   bool
	color  string
	paths  daemon.Paths
	remote api.Remote // flags of commands that can use a remote daemon
}

func newApp(stdin io.Reader, stdout, stderr io.Writer) *app {
	a := &app{stdin: stdin, terminal: stdout}
	escaped := func(w io.Writer) io.Writer {
		return &table.Output{To: w, Colored: func() bool { return a.usesColour(w) }}
	}
	a.stdout, a.stderr = escaped(stdout), escaped(stderr)
	return a
}

// exitError sets the exit code of the program. A nil err prints nothing.
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

// usageError returns an error about the command line. If the message ends in a list of lines, the
// reference to the manual is on its own line.
func usageError(cmd *cobra.Command, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	separator := "; "
	if strings.Contains(err.Error(), "\n") {
		separator = "\n"
	}
	return exitError{exitUsage, fmt.Errorf("%w%ssee '%s --help'", err, separator, cmd.CommandPath())}
}

// printError prints an error, as JSON with --json.
func (a *app) printError(err error) {
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
		errs.Render(a.stderr, a.usesColour(a.stderr))
		return
	}
	fmt.Fprintf(a.stderr, "%s %v\n", a.colour(a.stderr, red, "sluice:"), err)
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

// progress prints a line about a long operation to standard error, not with --json.
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

// colour colours s if w is a terminal and colours are not turned off.
func (a *app) colour(w io.Writer, sgr, s string) string {
	if !a.usesColour(w) {
		return s
	}
	return "\x1b[" + sgr + "m" + s + "\x1b[0m"
}

func (a *app) usesColour(w io.Writer) bool {
	switch a.color {
	case "always":
		return true
	case "never":
		return false
	}
	f, ok := table.File(w)
	return ok && os.Getenv("NO_COLOR") == "" && term.IsTerminal(int(f.Fd()))
}

// asksRemote adds the flags for a remote daemon over TCP to a command and its subcommands. The
// command obtains its client from client.
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

// serverFlag is the value of --server. An empty value, for example of an unset shell variable, is
// an error: it must not select the local daemon.
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

// client returns a client for the daemon that the flags select: local socket or remote.
func (a *app) client() (*api.Client, error) {
	switch {
	case a.remote.Server != "" && (a.paths.Socket != "" || a.paths.State != ""):
		return nil, exitError{exitUsage, errors.New("--server asks over TCP: --socket and --state-dir are of the daemon's own host")}
	case (a.remote.Cert == "") != (a.remote.Key == ""):
		return nil, exitError{exitUsage, errors.New("--cert FILE and --key FILE belong together: name both")}
	case a.remote.Server != "":
		return api.NewRemote(a.remote)
	case a.remote != (api.Remote{}):
		return nil, exitError{exitUsage, errors.New("--token-file, --ca, --cert and --key go with --server https://HOST:PORT")}
	}
	return api.NewClient(a.paths.SocketPath()), nil
}

// mayReadDisk reports whether a command may read the changes made at run time from the disk: err is that no
// daemon runs in the own network namespace.
func (a *app) mayReadDisk(err error) bool {
	return errors.Is(err, api.ErrNoDaemon) && a.remote.Server == "" && a.paths.LockKnown()
}

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
