// Command monitoring checks Cleave's alert rules and its dashboard.
package main
