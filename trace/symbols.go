// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// ErrHiddenSymbols says that the kernel shows addresses as zero to this process.
var ErrHiddenSymbols = errors.New("kernel addresses are hidden: run as root or with CAP_SYSLOG, and with sysctl kernel.kptr_restrict below 2")

// Symbols returns the kernel function that contains an address.
type Symbols struct {
	starts   []uint64
	names    []string
	programs *programs // nil: BPF programs are not looked at
}

// Symbol is a place in the kernel: the function's name without the compiler's
// suffixes, and the distance from its start in bytes.
type Symbol struct {
	Name   string
	Offset uint64
}

// String writes the place as name+0xoffset.
func (s Symbol) String() string { return fmt.Sprintf("%s+%#x", s.Name, s.Offset) }

// MarshalText returns the text of String.
func (s Symbol) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// LoadSymbols reads the running kernel's function addresses from /proc/kallsyms, except those of
// BPF programs.
func LoadSymbols() (*Symbols, error) {
	f, err := os.Open("/proc/kallsyms")
	if err != nil {
		return nil, fmt.Errorf("kernel symbols: %w", err)
	}
	defer f.Close()
	return ReadSymbols(f)
}

// symbolsAge is the lifetime of cached addresses, because modules are loaded and unloaded.
const symbolsAge = 10 * time.Minute

var symbolCache cachedSymbols

type cachedSymbols struct {
	sync.Mutex
	symbols *Symbols
	read    time.Time
}

// recentSymbols is LoadSymbols, but reads again only after symbolsAge: one reading costs some 50 ms of CPU time.
func recentSymbols() (*Symbols, error) {
	c := &symbolCache
	c.Lock()
	defer c.Unlock()
	if c.symbols != nil && time.Since(c.read) < symbolsAge {
		return c.symbols, nil
	}
	s, err := LoadSymbols()
	if err == nil {
		c.symbols, c.read = s, time.Now()
	}
	return s, err
}

// ReadSymbols parses /proc/kallsyms, "address type name [module]", up to the BPF programs, which
// follow the functions of kernel and modules. The kernel's listing time is quadratic in the number
// of programs: minutes with tens of thousands, as with Cilium.
func ReadSymbols(r io.Reader) (*Symbols, error) {
	type entry struct {
		start uint64
		name  string
	}
	var list []entry
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasSuffix(line, "\t[bpf]") {
			break
		}
		address, rest, ok := strings.Cut(line, " ")
		if !ok || len(rest) < 3 || !strings.ContainsRune("tTwW", rune(rest[0])) {
			continue
		}
		start, err := strconv.ParseUint(address, 16, 64)
		if err != nil || start == 0 {
			continue
		}
		name, _, _ := strings.Cut(rest[2:], "\t")
		list = append(list, entry{start, name})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("kernel symbols: %w", err)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("kernel symbols: %w", ErrHiddenSymbols)
	}
	slices.SortFunc(list, func(a, b entry) int { return cmp.Compare(a.start, b.start) })
	s := &Symbols{starts: make([]uint64, len(list)), names: make([]string, len(list))}
	for i, e := range list {
		s.starts[i], s.names[i] = e.start, e.name
	}
	return s, nil
}

// largestFunction is an upper limit of a function's size in bytes. An address further behind a
// function's start is outside kernel and modules, for example in a BPF trampoline.
const largestFunction = 1 << 20

// Find names the place of an address. Without symbols the address itself is the
// name.
func (s *Symbols) Find(address uint64) Symbol {
	if s != nil {
		if at, ok := s.programs.find(address); ok {
			return at
		}
		i, exact := slices.BinarySearch(s.starts, address)
		if !exact {
			i--
		}
		if i >= 0 && address-s.starts[i] < largestFunction {
			return Symbol{Name: BaseName(s.names[i]), Offset: address - s.starts[i]}
		}
	}
	return Symbol{Name: fmt.Sprintf("%#x", address)}
}

// compilerSuffixes are the suffixes of compiler-generated copies of a function.
var compilerSuffixes = []string{".isra.", ".constprop.", ".part.", ".cold", ".llvm."}

// BaseName removes the compiler's suffixes from a function's name.
func BaseName(symbol string) string {
	cut := len(symbol)
	for _, suffix := range compilerSuffixes {
		if i := strings.Index(symbol, suffix); i > 0 && i < cut {
			cut = i
		}
	}
	return symbol[:cut]
}
