// SPDX-License-Identifier: Apache-2.0

package nftlb

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-lb/sluice/disk"
)

// savedObjects is the stored form of the objects.
type savedObjects struct {
	Layout    int            `json:"layout"`
	Addresses []savedAddress `json:"addresses"`
	Policies  []*policy      `json:"policies"`
	Farms     []savedFarm    `json:"farms"`
}

type savedAddress struct {
	Address  *address `json:"address"`
	Policies []string `json:"policies"`
}

type savedFarm struct {
	Farm      *farm    `json:"farm"`
	Addresses []string `json:"addresses"`
	Policies  []string `json:"policies"`
}

const layout = 1

func (a *API) write() error {
	if a.opt.Path == "" {
		return nil
	}
	raw, err := json.Marshal(a.store.save())
	if err != nil {
		return err
	}
	raw = disk.Seal(raw)
	if old, err := disk.Read(a.opt.Path, maxSaved); err == nil && string(old) == string(raw) {
		return nil
	}
	err = os.MkdirAll(filepath.Dir(a.opt.Path), 0o700)
	if err == nil {
		err = disk.Replace(a.opt.Path, raw, 0o600)
	}
	if err != nil {
		return fmt.Errorf("the objects of the nftlb API cannot be kept: %w", err)
	}
	return nil
}

func (s *store) save() savedObjects {
	d := savedObjects{Layout: layout, Policies: s.policies}
	for _, a := range s.addresses {
		one := savedAddress{Address: a}
		for _, p := range a.policies {
			one.Policies = append(one.Policies, p.policy.Name)
		}
		d.Addresses = append(d.Addresses, one)
	}
	for _, f := range s.farms {
		one := savedFarm{Farm: f}
		for _, fa := range f.addresses {
			one.Addresses = append(one.Addresses, fa.address.Name)
		}
		for _, p := range f.policies {
			one.Policies = append(one.Policies, p.policy.Name)
		}
		for _, session := range f.Sessions {
			if session.Backend = ""; session.backend != nil {
				session.Backend = session.backend.Name
			}
		}
		d.Farms = append(d.Farms, one)
	}
	return d
}

// maxSaved is the largest file of objects that is read, in bytes.
const maxSaved = 256 << 20

// read restores the objects of an earlier process. If their file is damaged, it is renamed and nothing
// is restored.
func (a *API) read() {
	if a.opt.Path == "" {
		return
	}
	raw, err := disk.Read(a.opt.Path, maxSaved)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var d savedObjects
	sealed := false
	if err == nil {
		raw, sealed, err = disk.Unseal(raw)
	}
	if err == nil {
		decoder := json.NewDecoder(bytes.NewReader(raw))
		if !sealed { // by an earlier version: a damaged key must not be passed over
			decoder.DisallowUnknownFields()
		}
		err = decoder.Decode(&d)
	}
	if err == nil && d.Layout != layout {
		err = fmt.Errorf("layout %d, this version reads %d", d.Layout, layout)
	}
	if err == nil && !d.isIntact() {
		err = disk.ErrDamaged
	}
	if err == nil {
		a.store.restore(d)
		return
	}
	place := a.opt.Path + ".damaged"
	if moved := os.Rename(a.opt.Path, place); moved != nil {
		place = a.opt.Path
	}
	a.lost = fmt.Sprintf("the objects of the nftlb API are lost: %s: %v; their services stay in force until a client of the API changes an object", place, err)
	a.opt.Log.Warn(a.lost)
}

// isIntact reports whether no object is missing in a list or has no name.
func (d savedObjects) isIntact() bool {
	return !slices.Contains(d.Policies, nil) &&
		!slices.ContainsFunc(d.Addresses, func(a savedAddress) bool { return a.Address == nil }) &&
		!slices.ContainsFunc(d.Farms, func(f savedFarm) bool {
			return f.Farm == nil || slices.Contains(f.Farm.Backends, nil) || slices.Contains(f.Farm.Sessions, nil)
		})
}

// restore restores the stored objects, with all rules pending.
func (s *store) restore(d savedObjects) {
	s.policies = d.Policies
	for _, one := range d.Addresses {
		a := one.Address
		for _, name := range one.Policies {
			if p := s.policyNamed(name); p != nil {
				a.policies = append(a.policies, &addressPolicy{policy: p, action: none})
			}
		}
		s.addresses = append(s.addresses, a)
	}
	for _, one := range d.Farms {
		f := one.Farm
		f.action, f.policiesAction = none, none
		for _, name := range one.Addresses {
			if a := s.addressNamed(name); a != nil {
				f.addresses = append(f.addresses, &farmAddress{farm: f, address: a, action: none})
			}
		}
		for _, name := range one.Policies {
			if p := s.policyNamed(name); p != nil {
				f.policies = append(f.policies, &farmPolicy{farm: f, policy: p, action: none})
			}
		}
		for _, b := range f.Backends {
			b.farm, b.action = f, none
		}
		for _, session := range f.Sessions {
			session.backend = f.backend(session.Backend)
		}
		s.farms = append(s.farms, f)
	}
	for _, p := range s.policies {
		p.action = none
	}
	for _, a := range s.addresses {
		a.action = none
	}
}
