// SPDX-License-Identifier: Apache-2.0

package doctor

import "slices"

// Checks returns all checks, in the order of the report. A new check is a new line in one of these
// groups.
func Checks() []Check {
	return slices.Concat(outcomeChecks(), tableChecks(), entryChecks(), portChecks(), ruleChecks(), forwardChecks(), pathChecks(), wayChecks(), neighbourChecks(), linkChecks(), frameChecks(), socketChecks(), kernelChecks())
}
