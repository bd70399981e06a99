// SPDX-License-Identifier: Apache-2.0

// Command sluice is a NAT gateway and layer-4 load balancer for Linux. It also diagnoses slow NAT,
// fixes it, and measures the improvement.
package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes. Commands with a verdict (doctor, bench --check) use 1 and 2 for it, and doctor uses 3
// for its own errors. Their help lists the codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 64 // EX_USAGE of sysexits.h
)

// errInterrupted is the error after Ctrl-C.
var errInterrupted = errors.New("interrupted")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// execute runs one command line and returns its exit code.
func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp(stdin, stdout, stderr)
	root := newRoot(a)
	root.InitDefaultCompletionCmd() // cobra would create it after usageArgs
	helpKnows(root)
	usageArgs(root)
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var status exitError
	if errors.As(err, &status) {
		if status.err != nil {
			a.printError(status.err)
		}
		return status.code
	}
	if err == context.Canceled { // Ctrl-C without another error
		err = errInterrupted
	}
	a.printError(err)
	return exitFailure
}

// newRoot lists every subcommand: one constructor, one file each.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:           "sluice",
		Short:         "NAT gateway and layer-4 load balancer for Linux",
		Long:          "Sluice translates and balances traffic on nftables and eBPF from one configuration,\nand explains why NAT on a host is slow or dropping.",
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	flags := root.PersistentFlags()
	flags.BoolVar(&a.json, "json", false, "print JSON instead of text")
	flags.StringVar(&a.color, "color", "auto", "colours: auto (only on a terminal), always or never")
	flags.StringVar(&a.paths.Socket, "socket", "", "the daemon's socket (default STATE-DIR/sluice.sock)")
	flags.StringVar(&a.paths.State, "state-dir", "", "where socket, lock and pins live (default /run/sluice, or a directory per network namespace below it)")
	root.SetFlagErrorFunc(flagError)
	completeFlag(root, "color", "auto", "always", "never")
	_ = root.MarkPersistentFlagDirname("state-dir")
	fitHelp(root)
	root.AddGroup(
		&cobra.Group{ID: "gateway", Title: "The gateway:"},
		&cobra.Group{ID: "diagnosis", Title: "Diagnosis:"},
		&cobra.Group{ID: "measure", Title: "Measurement and play:"},
	)
	root.AddCommand(subcommands(a)...)
	return root
}

// subcommands is the one list of commands.
func subcommands(a *app) []*cobra.Command {
	return []*cobra.Command{
		newRun(a), asksRemote(a, newStop(a)), asksRemote(a, newApply(a)), asksRemote(a, newDiff(a)),
		asksRemote(a, newShow(a)), asksRemote(a, newEvents(a)), asksRemote(a, newAudit(a)),
		asksRemote(a, newService(a)), asksRemote(a, withBackendObjects(a, newBackend(a))), asksRemote(a, newDrain(a)), asksRemote(a, newNode(a)), asksRemote(a, newNAT(a)), asksRemote(a, newSet(a)),
		asksRemote(a, newExplain(a)),
		newCheck(a), newConfig(a), newImport(a),
		newAccelerate(a),
		newDoctor(a), newDrops(a), newProfile(a), newDiscover(a),
		newDocs(a),
		newLab(a),
		withCleanup(a, newDemo(a)),
		withCleanup(a, newBench(a)), newLoad(a),
		newConns(a), newPlan(a), withCleanup(a, newTune(a)), newTop(a),
	}
}
