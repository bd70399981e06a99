// SPDX-License-Identifier: Apache-2.0

// Package vm runs test binaries on another kernel. It packs them with that kernel's modules into an initramfs, boots
// it under QEMU, and reads their output from the console. Its test runs Sluice's privileged tests on Debian's 6.1
// kernel, the oldest supported one.
package vm

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Machine describes the virtual machine.
type Machine struct {
	Kernel  string   // Path of a vmlinuz; its modules are in /lib/modules.
	Modules []string // to load before the first command, without ".ko"
	Memory  string   // in QEMU's syntax; "" means 2G
	// Files to copy into the machine, by their path there; directories are copied recursively.
	Files map[string]string
	// Programs of this machine to copy to /usr/bin there, with their shared libraries.
	Programs []string
	// Commands run in sequence, each in its own directory.
	Commands []string
	Output   io.Writer // receives the console output; may be nil
}

const marker = "SLUICE-VM-EXIT"

// Run boots the machine, runs the commands and returns their exit codes.
func (m Machine) Run(ctx context.Context) ([]int, error) {
	dir, err := os.MkdirTemp("", "sluice-vm-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	initramfs := filepath.Join(dir, "initramfs.gz")
	if err := m.pack(initramfs); err != nil {
		return nil, fmt.Errorf("initramfs: %w", err)
	}
	memory := m.Memory
	if memory == "" {
		memory = "2G"
	}
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", "tcg,tb-size=512", "-cpu", "qemu64", "-smp", "2", "-m", memory,
		"-display", "none", "-nodefaults", "-serial", "stdio", "-no-reboot", "-kernel", m.Kernel, "-initrd", initramfs,
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("qemu: %w", err)
	}
	codes, err := m.follow(out)
	return codes, errors.Join(err, cmd.Wait())
}

// follow copies the console and collects the exit codes from it.
func (m Machine) follow(console io.Reader) ([]int, error) {
	var codes []int
	var err error
	lines := bufio.NewScanner(console)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		if strings.Contains(line, "no tests to run") {
			err = fmt.Errorf("%s: its pattern matches no test", m.Commands[len(codes)])
		}
		if rest, ok := strings.CutPrefix(line, marker+" "); ok {
			code := -1
			if _, err := fmt.Sscan(rest, &code); err != nil {
				return codes, fmt.Errorf("console says %q: %w", line, err)
			}
			codes = append(codes, code)
			continue
		}
		if m.Output != nil {
			fmt.Fprintln(m.Output, line)
		}
	}
	if len(codes) < len(m.Commands) {
		return codes, fmt.Errorf("the machine ended after %d of %d commands", len(codes), len(m.Commands))
	}
	return codes, errors.Join(err, lines.Err())
}

// pack writes the initramfs.
func (m Machine) pack(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	zip, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
	if err != nil {
		return err
	}
	a := newArchive(zip)
	if err := m.fill(a); err != nil {
		return err
	}
	return errors.Join(a.close(), zip.Close())
}

func (m Machine) fill(a *archive) error {
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	a.file("bin/busybox", 0o755, busybox)
	a.symlink("bin/sh", "busybox")
	a.dir("proc")
	a.dir("sys")
	a.dir("dev")
	a.dir("tmp")
	a.dir("run")
	modules, err := m.modules()
	if err != nil {
		return err
	}
	for _, file := range modules {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		a.file("modules/"+filepath.Base(file), 0o644, data)
	}
	for to, from := range m.Files {
		if err := addTree(a, strings.TrimPrefix(to, "/"), from); err != nil {
			return err
		}
	}
	for _, program := range m.Programs {
		if err := addProgram(a, program); err != nil {
			return err
		}
	}
	a.file("init", 0o755, m.initScript(modules))
	return a.err
}

// addProgram adds a program and its libraries, as listed by ldd.
func addProgram(a *archive, name string) error {
	path, err := exec.LookPath(name)
	if err != nil {
		return err
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		return fmt.Errorf("ldd %s: %w", path, err)
	}
	put := map[string]string{path: "usr/bin/" + filepath.Base(path)} // first in PATH, before busybox
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "/") {
			put[word] = strings.TrimPrefix(word, "/")
		}
	}
	for from, to := range put {
		if a.made[to] {
			continue
		}
		a.made[to] = true
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		a.file(to, 0o755, data)
	}
	return nil
}

func addTree(a *archive, to, from string) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		a.file(filepath.Join(to, rel), info.Mode(), data)
		return nil
	})
}

func (m Machine) initScript(modules []string) []byte {
	var b bytes.Buffer
	b.WriteString(`#!/bin/sh
/bin/busybox --install -s /bin
export PATH=/usr/bin:/bin HOME=/tmp CI=true SLUICE_FEW_PROGRAMS=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mkdir -p /run/lock /run/netns
ip link set lo up
ulimit -n 65536
`)
	for _, file := range modules {
		fmt.Fprintf(&b, "insmod /modules/%s || echo 'module %s does not load'\n", filepath.Base(file), filepath.Base(file))
	}
	for _, c := range m.Commands {
		program, _, _ := strings.Cut(c, " ")
		fmt.Fprintf(&b, "cd %s && %s\necho %s $?\n", filepath.Dir(program), c, marker)
	}
	b.WriteString("sync\npoweroff -f\n")
	return b.Bytes()
}

// modules returns the files of the selected modules and of their dependencies, in load order.
func (m Machine) modules() ([]string, error) {
	release := strings.TrimPrefix(filepath.Base(m.Kernel), "vmlinuz-")
	dir := filepath.Join("/lib/modules", release)
	dep, err := os.ReadFile(filepath.Join(dir, "modules.dep"))
	if err != nil {
		return nil, err
	}
	needs := map[string][]string{} // File → its dependencies, nearest first.
	file := map[string]string{}    // Module → file.
	for line := range strings.Lines(string(dep)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		needs[name] = strings.Fields(rest)
		module := strings.TrimSuffix(filepath.Base(name), ".ko")
		file[strings.ReplaceAll(module, "-", "_")] = name
	}
	var order []string
	seen := map[string]bool{}
	var add func(string)
	add = func(name string) {
		if seen[name] {
			return
		}
		seen[name] = true
		for _, n := range needs[name] {
			add(n)
		}
		order = append(order, filepath.Join(dir, name))
	}
	for _, module := range m.Modules {
		name, ok := file[strings.ReplaceAll(module, "-", "_")]
		if !ok {
			return nil, fmt.Errorf("kernel %s has no module %s", release, module)
		}
		add(name)
	}
	return order, nil
}
