// SPDX-License-Identifier: Apache-2.0

package firewall

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// legacyPacketRules is PacketRules for the output of iptables-legacy-save or ip6tables-legacy-save. Every chain counts that forwarded packets
// may traverse, also behind a rule that accepts established connections.
func legacyPacketRules(program, saved string) (out []PacketRule) {
	for _, line := range parseSave(saved) {
		if line.table == "nat" || line.policy != "" || line.chain == "INPUT" || line.chain == "OUTPUT" {
			continue
		}
		if what, where := legacyPacketPart(&line); what != "" {
			out = append(out, PacketRule{Rule: program + " " + line.table + " " + line.text, What: what, Where: where})
		}
	}
	return out
}

// legacyPacketPart returns the part of a rule that depends on single packets, "" if there is none, and the condition of the
// packets that reach it.
func legacyPacketPart(line *savedRule) (what string, where Where) {
	if p := line.option("-p"); p != "" && p != "tcp" && p != "udp" && p != "all" && !slices.Contains(line.words, "!") {
		return "", where
	}
	if states := line.option("--ctstate", "--state"); states != "" && !slices.Contains(line.words, "!") && !slices.Contains(strings.Split(states, ","), "ESTABLISHED") {
		return "", where
	}
	first, ofConnection := len(line.words), false
	for i, word := range line.words {
		next := ""
		if i+1 < len(line.words) {
			next = line.words[i+1]
		}
		before := what
		switch word {
		case "--tcp-flags":
			if i+2 < len(line.words) && line.words[i-1] != "!" && slices.ContainsFunc(strings.Split(line.words[i+2], ","), func(f string) bool { return f == "SYN" || f == "FIN" }) {
				return "", where
			}
			what = "TCP flags"
		case "--syn":
			return "", where
		case "-f", "--fragment", "--tcp-option", "--ctexpire":
			what = word
		case "-m":
			if !slices.Contains(constantMatches, next) && !slices.Contains(otherProtocols, next) {
				what = "match " + next
			}
		case "-j":
			builtIn := next == strings.ToUpper(next)
			if builtIn && !slices.Contains(constantTargets, next) && slices.Contains(packetTargets, next) {
				what = "target " + next
			}
		}
		if what != before {
			first = min(first, i)
			ofConnection = ofConnection || slices.Contains(connectionParts, what)
		}
	}
	if where = line.where(first); ofConnection {
		where = where.withoutInterfaces()
	}
	return what, where
}

// packetTargets are targets of iptables that act on each packet. Other names in capitals are chains.
var packetTargets = []string{"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNSECMARK", "DSCP", "ECN", "HMARK", "IDLETIMER", "LED", "LOG",
	"NFLOG", "NFQUEUE", "QUEUE", "RATEEST", "SECMARK", "SET", "SYNPROXY", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE", "TTL", "ULOG"}

// Options and structures of linux/netfilter_ipv4/ip_tables.h, whose names and numbers ip6_tables.h has too.
const (
	iptGetInfo    = 64 // IPT_SO_GET_INFO
	iptGetEntries = 65 // IPT_SO_GET_ENTRIES
	iptName       = 32 // XT_TABLE_MAXNAMELEN
	iptInfoSize   = 84 // struct ipt_getinfo
	iptHeader     = 40 // struct ipt_get_entries, without its entries
)

// legacyLayout is where iptables or ip6tables keeps its tables.
type legacyLayout struct {
	names                string
	domain, level        int
	next, counters, size int // in struct ipt_entry or ip6t_entry
}

var legacyLayouts = []legacyLayout{
	{"ip_tables_names", unix.AF_INET, unix.SOL_IP, 90, 96, 112},
	{"ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 142, 152, 168},
}

// LegacyTables returns the rules of iptables-legacy and ip6tables-legacy as the kernel stores them, without their
// counters, by family and table. Two results are equal if the rules are. It loads no table.
func LegacyTables() (map[string]string, error) {
	tables := map[string]string{}
	for i := range legacyLayouts {
		if err := legacyLayouts[i].read(tables); err != nil {
			return nil, err
		}
	}
	return tables, nil
}

func (l *legacyLayout) read(tables map[string]string) error {
	names, err := os.ReadFile("/proc/thread-self/net/" + l.names)
	if errors.Is(err, os.ErrNotExist) || len(bytes.TrimSpace(names)) == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	fd, err := unix.Socket(l.domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	for _, name := range strings.Fields(string(names)) {
		rules, err := l.blob(fd, name)
		if err != nil {
			return fmt.Errorf("table %s of %s: %w", name, l.names, err)
		}
		tables[l.names+" "+name] = rules
	}
	return nil
}

// blob reads one table. The table may be replaced between its two requests.
func (l *legacyLayout) blob(fd int, name string) (string, error) {
	var err error
	for range readAgain {
		info := make([]byte, iptInfoSize)
		copy(info, name)
		if err = getsockopt(fd, l.level, iptGetInfo, info); err != nil {
			return "", err
		}
		size := binary.NativeEndian.Uint32(info[iptInfoSize-4:])
		blob := make([]byte, iptHeader+int(size))
		copy(blob, name)
		binary.NativeEndian.PutUint32(blob[iptName:], size)
		if err = getsockopt(fd, l.level, iptGetEntries, blob); err == nil {
			return l.withoutCounters(blob[iptHeader:]), nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return "", err
		}
	}
	return "", err
}

func getsockopt(fd, level, option int, value []byte) error {
	size := uint32(len(value))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&value[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// withoutCounters sets the counters of each entry to zero.
func (l *legacyLayout) withoutCounters(entries []byte) string {
	for at := 0; at+l.size <= len(entries); {
		clear(entries[at+l.counters : at+l.size])
		next := int(binary.NativeEndian.Uint16(entries[at+l.next:]))
		if next < l.size {
			break
		}
		at += next
	}
	return string(entries)
}
