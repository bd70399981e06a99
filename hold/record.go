// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-lb/sluice/disk"
	"github.com/sluice-lb/sluice/netdev"
)

// recordFile lists the addresses that Sluice has added to interfaces. If this process is killed, the next one, or
// "sluice stop --force", removes them. The file is written before an address is added and after one is removed.
const recordFile = "addresses.json"

type storedAddress struct {
	Ifindex   int        `json:"ifindex"`
	Interface string     `json:"interface"`
	Address   netip.Addr `json:"address"`
}

// maxRecord is the largest record that is read, in bytes.
const maxRecord = 16 << 20

// readRecord returns the addresses that a process added in this network namespace, with the names of the
// interfaces. If the record is damaged, it returns the addresses with the mark of Sluice, and lost
// describes the damage.
func readRecord(dir string) (record map[key]string, lost string, err error) {
	path := filepath.Join(dir, recordFile)
	text, err := disk.Read(path, maxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return map[key]string{}, "", nil
	}
	var list []storedAddress
	if err == nil {
		err = json.Unmarshal(text, &list)
	}
	if err == nil && slices.ContainsFunc(list, func(r storedAddress) bool { return !r.Address.IsValid() }) {
		err = errors.New("an entry has no address")
	}
	if err != nil {
		lost = fmt.Sprintf("held addresses: %s: %v; addresses with protocol %#x are taken for held ones", path, err, Protocol)
		record, err = readMarked()
		return record, lost, err
	}
	record = map[key]string{}
	for _, r := range list {
		record[key{r.Ifindex, r.Address}] = r.Interface
	}
	return record, "", nil
}

// readMarked returns the addresses on interfaces that have the mark of Sluice. Kernels before 5.18 do not
// keep the mark.
func readMarked() (map[key]string, error) {
	addresses, err := readAddresses()
	if err != nil {
		return nil, err
	}
	links, err := netdev.Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("interfaces: %w", err)
	}
	record := map[key]string{}
	for _, a := range addresses {
		if a.proto != Protocol || a.bits != a.at.BitLen() {
			continue
		}
		for _, l := range links {
			if l.Attrs().Index == a.index {
				record[key{a.index, a.at}] = l.Attrs().Name
			}
		}
	}
	return record, nil
}

// writeRecord replaces the file, or removes it if the record is empty.
func writeRecord(dir string, record map[key]string) error {
	path := filepath.Join(dir, recordFile)
	if len(record) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("held addresses: %w", err)
		}
		return nil
	}
	var list []storedAddress
	for k, name := range record {
		list = append(list, storedAddress{k.ifindex, name, k.at})
	}
	slices.SortFunc(list, func(a, b storedAddress) int {
		return cmp.Or(cmp.Compare(a.Ifindex, b.Ifindex), a.Address.Compare(b.Address))
	})
	text, err := json.Marshal(list)
	if err != nil {
		return err
	}
	if err := disk.Replace(path, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("held addresses: %w", err)
	}
	return nil
}

// Left reports whether an earlier process has left addresses on interfaces.
func Left(dir string) (bool, error) {
	record, _, err := readRecord(dir)
	return len(record) > 0, err
}

// Remove removes the addresses that an earlier process left.
func Remove(dir string) error {
	record, _, err := readRecord(dir)
	if err != nil {
		return err
	}
	return removeRecorded(dir, record, func(key) bool { return true })
}

// removeRecorded removes the chosen addresses from their interfaces, except addresses that another program has added in the
// meantime.
func removeRecorded(dir string, record map[key]string, chosen func(key) bool) error {
	var errs []error
	there, err := readAddresses()
	if err != nil {
		return err
	}
	changed := false
	for k := range record {
		if !chosen(k) {
			continue
		}
		if slices.ContainsFunc(there, func(a address) bool { return a.index == k.ifindex && a.at == k.at && a.mayBeOurs() }) {
			if err := remove(k); err != nil {
				errs = append(errs, fmt.Errorf("address %s of interface %s: %w", k.at, record[k], err))
				continue
			}
		}
		delete(record, k)
		changed = true
	}
	if changed {
		errs = append(errs, writeRecord(dir, record))
	}
	return errors.Join(errs...)
}
