// SPDX-License-Identifier: Apache-2.0

package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// maxOutput is the stored length of a program's output in bytes.
const maxOutput = 4 << 10

// execProber runs a program without a shell: exit status 0 is good. The program leads its own process group. The
// group is killed at the timeout, or if children keep the output open after the program's exit.
type execProber struct{}

// Probe implements Prober.
func (execProber) Probe(ctx context.Context, t *Target) error {
	if len(t.Check.Command) == 0 {
		return errors.New("no command")
	}
	cmd := exec.CommandContext(ctx, t.Check.Command[0], t.Check.Command[1:]...)
	cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"SLUICE_SERVICE=" + t.Service,
		"SLUICE_BACKEND=" + t.Backend,
		"SLUICE_ADDRESS=" + t.Server.String(),
		"SLUICE_PORT=" + strconv.Itoa(int(t.Port)),
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return killGroup(cmd) }
	cmd.WaitDelay = 100 * time.Millisecond // for children that keep the output open
	var out outputTail
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, exec.ErrWaitDelay): // children keep the output open, so the process group ID is still in use
		killGroup(cmd)
		return nil
	case err == nil:
		return nil
	}
	if last := out.lastLine(); last != "" {
		return fmt.Errorf("%w: %s", err, last)
	}
	return err
}

func killGroup(cmd *exec.Cmd) error {
	if cmd.Process == nil {
		return nil
	}
	return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
}

// outputTail keeps the last maxOutput bytes written to it.
type outputTail struct{ kept []byte }

// Write implements io.Writer.
func (t *outputTail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p[max(0, len(p)-maxOutput):]...)
	if len(t.kept) > maxOutput {
		t.kept = append(t.kept[:0], t.kept[len(t.kept)-maxOutput:]...)
	}
	return len(p), nil
}

// lastLine returns the last nonempty line, printable.
func (t *outputTail) lastLine() string {
	line := bytes.TrimSpace(t.kept)
	if i := bytes.LastIndexByte(line, '\n'); i >= 0 {
		line = line[i+1:]
	}
	const shown = 200
	line = line[:min(len(line), shown)]
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(line), "?"))
}
