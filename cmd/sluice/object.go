// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/sluice-lb/sluice/api"
	"github.com/sluice-lb/sluice/config"
	"github.com/sluice-lb/sluice/table"
)

// objectKind is a kind of objects that commands add, change and remove one by one.
type objectKind struct {
	word    string   // Used in the command and in messages.
	args    []string // Names before the keys; the last one is the object's.
	list    []string // Path of the list; the names but the last follow at its "*".
	example []string // Arguments of an add and of a set.
}

func newService(a *app) *cobra.Command {
	k := objectKind{"service", []string{"service"}, []string{"services"}, []string{
		"shop listen='[{address: 192.0.2.7, ports: [80]}]' protocol=tcp mode=dnat backends='[{address: 10.0.0.7}]'", "shop scheduler=wlc"}}
	return k.command(a, &cobra.Command{Use: "service", Short: "Add, change and remove services of the running daemon"})
}

func newNAT(a *app) *cobra.Command {
	k := objectKind{"NAT rule", []string{"rule"}, []string{"nat"}, []string{
		"guests type=masquerade source='[10.9.0.0/24]' out=wan0", "guests ports-per-client=500"}}
	return k.command(a, &cobra.Command{Use: "nat", Short: "Add, change and remove NAT rules of the running daemon"})
}

// withBackendObjects gives the command backend its subcommands.
func withBackendObjects(a *app, cmd *cobra.Command) *cobra.Command {
	k := objectKind{"backend", []string{"service", "backend"}, []string{"services", "*", "backends"}, []string{
		"web d address=10.0.2.5 port=8080 weight=2", "web d weight=4"}}
	return k.command(a, cmd)
}

// command adds the subcommands list, add, set and rm.
func (k objectKind) command(a *app, cmd *cobra.Command) *cobra.Command {
	cmd.GroupID = "gateway"
	if cmd.Long == "" {
		cmd.Long = "Each change is applied as a whole or not at all, answered when the kernel has it, and kept over\n" +
			"restarts; 'sluice config history' lists it. The keys are those of the configuration file."
		cmd.Example = "  sluice " + cmd.Use + " list\n  sluice " + cmd.Use + " set " + k.example[1] + "\n  sluice " + cmd.Use + " rm " + strings.Fields(k.example[0])[0]
	}
	word, _, _ := strings.Cut(cmd.Use, " ")
	names := strings.ToUpper(strings.Join(k.args, " "))
	object := strings.Join(strings.Fields(k.example[0])[:len(k.args)], " ")
	cmd.AddCommand(
		k.changeCommand(a, "add", &cobra.Command{
			Use:   "add " + names + " KEY=VALUE... | -",
			Short: "Add a " + k.word,
			Long:  "Add adds a " + k.word + " by the keys of the configuration file. VALUE is YAML; - reads the whole\nobject as YAML or JSON from standard input.",
			Example: "  sluice " + word + " add " + strings.ReplaceAll(k.example[0], " protocol=", " \\\n      protocol=") +
				"\n  sluice " + word + " add " + object + " - < object.yaml",
		}),
		k.changeCommand(a, "patch", &cobra.Command{
			Use:     "set " + names + " KEY=VALUE... | -",
			Short:   "Change keys of a " + k.word,
			Long:    "Set changes keys of a " + k.word + "; the other keys stay. VALUE is YAML; null removes a key. - reads the\nkeys as YAML or JSON from standard input.",
			Example: "  sluice " + word + " set " + k.example[1],
		}),
		k.changeCommand(a, "remove", &cobra.Command{
			Use:     "rm " + names,
			Short:   "Remove a " + k.word,
			Long:    "Rm removes a " + k.word + " from the configuration in force. Its connections end as the configuration says.",
			Example: "  sluice " + word + " rm " + object,
		}),
		k.listing(a, word),
	)
	return cmd
}

// path returns the path of the object, or with fewer names of the list, in the configuration.
func (k objectKind) path(names []string) string {
	var steps []string
	for _, s := range k.list {
		if s == "*" {
			s, names = names[0], names[1:]
		}
		steps = append(steps, s)
	}
	return config.Join(append(steps, names...)...)
}

func (k objectKind) changeCommand(a *app, op string, cmd *cobra.Command) *cobra.Command {
	dryRun := cmd.Flags().Bool("dry-run", false, "change nothing, and show what would change")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) < len(k.args) {
			return usageError(cmd, "%s: which %s?", cmd.Name(), k.args[len(args)])
		}
		change := api.ObjectChange{Op: op, Path: k.path(args[:len(k.args)])}
		rest := args[len(k.args):]
		switch {
		case op == "remove" && len(rest) > 0:
			return usageError(cmd, "argument %q is one too many", rest[0])
		case op != "remove" && len(rest) == 0:
			return usageError(cmd, "%s: which keys? write KEY=VALUE, or - to read them from standard input", cmd.Name())
		case op != "remove":
			value, err := a.keys(cmd, rest)
			if err != nil {
				return err
			}
			change.Value = value
		}
		if op == "add" {
			value, ok := change.Value.(map[string]any)
			if !ok {
				return usageError(cmd, "standard input holds no mapping")
			}
			name := args[len(k.args)-1]
			if given, ok := value["name"]; ok && given != name {
				return usageError(cmd, "name %v is not %s: leave it out", given, name)
			}
			value["name"], change.Path = name, k.path(args[:len(k.args)-1])
		}
		return a.change(cmd, *dryRun, change)
	}
	return cmd
}

// keys reads KEY=VALUE arguments, or with - an object from standard input.
func (a *app) keys(cmd *cobra.Command, args []string) (any, error) {
	if len(args) == 1 && args[0] == "-" {
		raw, err := io.ReadAll(io.LimitReader(a.stdin, config.MaxFileSize))
		if err != nil {
			return nil, err
		}
		var value any
		if err := yaml.Unmarshal(raw, &value); err != nil {
			return nil, fmt.Errorf("standard input: %w", err)
		}
		return value, nil
	}
	object := map[string]any{}
	for _, arg := range args {
		key, text, ok := strings.Cut(arg, "=")
		if !ok || key == "" {
			return nil, usageError(cmd, "%q: write KEY=VALUE", arg)
		}
		if _, twice := object[key]; twice {
			return nil, usageError(cmd, "%s is given twice", key)
		}
		var value any
		if err := yaml.Unmarshal([]byte(text), &value); err != nil {
			return nil, usageError(cmd, "%s: %q is not YAML", key, text)
		}
		object[key] = value
	}
	return object, nil
}

func (a *app) change(cmd *cobra.Command, dryRun bool, changes ...api.ObjectChange) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	out, err := c.Change(cmd.Context(), changes, dryRun)
	if err != nil {
		return err
	}
	return a.print(out, func(w io.Writer) error {
		verb := "applied"
		if dryRun {
			verb = "would apply"
		}
		out.Places = nil // all placements; the lines contain the changes
		return writeOutcome(w, out, verb)
	})
}

func (k objectKind) listing(a *app, word string) *cobra.Command {
	of := k.args[:len(k.args)-1]
	use := "list"
	for _, name := range of {
		use += " " + strings.ToUpper(name)
	}
	args := noArgs
	example := "  sluice " + word + " list"
	if len(of) > 0 {
		args, example = requireArgs(of...), example+" web"
	}
	return &cobra.Command{
		Use:     use,
		Short:   "List the " + k.word + "s of the configuration in force",
		Long:    "List prints the " + k.word + "s of the configuration in force, one a line, as YAML. 'sluice show' prints\ntheir state and counters.",
		Example: example,
		Args:    args,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.listObjects(cmd, k.path(args))
		},
	}
}

// listObjects prints the objects of a list, or the sets.
func (a *app) listObjects(cmd *cobra.Command, path string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	raw, err := c.Object(cmd.Context(), path)
	if err != nil {
		return err
	}
	var list any
	if err := json.Unmarshal(raw, &list); err != nil {
		return err
	}
	return a.print(list, func(w io.Writer) error {
		switch list := list.(type) {
		case map[string]any:
			for _, name := range slices.Sorted(maps.Keys(list)) {
				if _, err := table.Line(w, "%s: %s", name, oneLine(list[name])); err != nil {
					return err
				}
			}
		case []any:
			for _, item := range list {
				if _, err := table.Line(w, "%s", oneLine(item)); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// oneLine writes a value of JSON as YAML in one line.
func oneLine(v any) string {
	var n yaml.Node
	if err := n.Encode(v); err != nil {
		return err.Error()
	}
	n.Style |= yaml.FlowStyle
	text, err := yaml.Marshal(&n)
	if err != nil {
		return err.Error()
	}
	return strings.Join(strings.Fields(string(text)), " ")
}

func newSet(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "set",
		GroupID: "gateway",
		Short:   "Add and remove elements of firewall sets of the running daemon",
		Long: "Sets hold addresses and prefixes, which services and firewall rules name in allow, deny and\n" +
			"\"@NAME\". Each change is applied as a whole or not at all, and kept over restarts.",
		Example: "  sluice set add banned 198.51.100.0/24 2001:db8:bad::/48\n  sluice set rm banned 198.51.100.0/24\n  sluice set list",
	}
	add := &cobra.Command{
		Use: "add SET [ELEMENT...]", Short: "Add elements to a set, and create the set if it does not exist",
		Long:    "Add adds addresses and prefixes to a set. If there is no set of that name, it is created.",
		Example: "  sluice set add banned 198.51.100.7 203.0.113.0/24",
	}
	rm := &cobra.Command{
		Use: "rm SET [ELEMENT...]", Short: "Remove elements of a set, or all of it",
		Long:    "Rm removes addresses and prefixes from a set; without elements it removes the set.",
		Example: "  sluice set rm banned 198.51.100.7\n  sluice set rm banned",
	}
	for _, sub := range []*cobra.Command{add, rm} {
		dryRun := sub.Flags().Bool("dry-run", false, "change nothing, and show what would change")
		sub.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError(cmd, "%s: which set?", cmd.Name())
			}
			change := api.ObjectChange{Op: "add-elements", Path: config.Join("firewall", "sets", args[0]), Value: args[1:]}
			if sub == rm {
				if change.Op = "remove-elements"; len(args) == 1 {
					change.Op, change.Value = "remove", nil
				}
			}
			return a.change(cmd, *dryRun, change)
		}
	}
	list := &cobra.Command{
		Use: "list", Short: "List the sets", Long: "List prints every set with its elements.", Example: "  sluice set list", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.listObjects(cmd, "firewall/sets") },
	}
	cmd.AddCommand(add, rm, list)
	return cmd
}
