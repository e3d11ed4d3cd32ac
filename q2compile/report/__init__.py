# SPDX-License-Identifier: Apache-2.0
"""Reports of a compilation for users: rows, tables, pages, dumps. The compiler notifies this
package and never queries it. May import capture, cost_model, graph, linear, passes, recipes
and lowering.
"""
